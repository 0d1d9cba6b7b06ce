"""Every update layout beside one process."""
