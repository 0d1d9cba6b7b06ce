"""Held-out prompts answered and scored, and when that happens during training."""
