"""Data rows and prompts: found, read, checked, and put into the order of a run."""
