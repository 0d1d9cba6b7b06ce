"""The sample flow over emulated nodes."""
