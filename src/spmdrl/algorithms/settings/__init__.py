"""Settings of the algorithms; importable without PyTorch."""
