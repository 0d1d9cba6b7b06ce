"""The update of one rank beside plain PyTorch."""
