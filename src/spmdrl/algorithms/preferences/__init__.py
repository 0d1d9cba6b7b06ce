"""Algorithms that learn from which of two responses is the better one."""
