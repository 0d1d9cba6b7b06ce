"""The algorithms' settings, which are read without PyTorch."""
