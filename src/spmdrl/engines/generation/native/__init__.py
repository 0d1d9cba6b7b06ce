"""The native engine: the trainer's own decoder over a paged KV cache."""
