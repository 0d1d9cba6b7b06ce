"""Layer 2, what computes: knows tensors, not columns, not algorithms."""
