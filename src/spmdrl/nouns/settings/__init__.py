"""Settings of a run, grouped by what they configure; importable without PyTorch."""
