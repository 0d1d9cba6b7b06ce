"""The settings of a run by what they configure; they are read without PyTorch."""
