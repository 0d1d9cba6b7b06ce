"""Where the numbers and samples of a run go: JSON Lines files and trackers."""
