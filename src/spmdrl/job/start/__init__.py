"""A job before its first step: checks, facts that ranks compare, estimates and the banner."""
