"""Layer 4, what to learn: pure tensor functions; no process group, device or I/O."""
