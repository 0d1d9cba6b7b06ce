"""The training engine: shards, micro-batches, losses, the optimizer and checkpoints."""
