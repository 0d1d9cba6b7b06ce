"""Rewards with explicit verdicts, computed where they can be killed."""
