"""Training on pairs of data rows: what a step takes, what it minimises, and how held-out pairs are judged."""
