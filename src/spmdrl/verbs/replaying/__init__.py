"""What the verb `replay` does again of a run, watches and prints."""
