"""Data rows and prompts: look-up, reading, checks, and order."""
