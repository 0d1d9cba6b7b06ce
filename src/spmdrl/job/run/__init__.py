"""A run's folder: locking, resuming, logs and checkpoints."""
