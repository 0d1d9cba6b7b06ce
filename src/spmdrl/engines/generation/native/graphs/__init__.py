"""Decoding steps captured as graphs, and started ahead of what the host reads."""
