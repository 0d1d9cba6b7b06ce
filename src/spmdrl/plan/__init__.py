"""Plans of a run from its config alone, on a CPU: memory, moved bytes and time, and dry runs of single ranks."""
