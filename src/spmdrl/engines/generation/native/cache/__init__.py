"""The paged KV cache: who holds which blocks, which rows run, and attention over blocks."""
