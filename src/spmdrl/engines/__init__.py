"""Layer 2, what computes: works on tensors, without columns or algorithms."""
