"""Worker states: each takes columns from the dock, calls an engine, and puts columns back."""
