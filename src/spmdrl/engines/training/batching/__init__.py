"""Packed rows in, micro-batches of nearly equal cost out."""
