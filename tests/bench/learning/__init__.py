"""Algorithms on a task that a tiny model learns in a minute, from one checkpoint."""
