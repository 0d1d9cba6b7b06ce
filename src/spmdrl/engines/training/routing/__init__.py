"""Routers of sparse layers in training: even loads, replayed choices, and their statistics."""
