"""Checkpoints of a training engine: complete folders in the Hugging Face layout, checked by their manifests."""
