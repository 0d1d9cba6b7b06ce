"""Output on a terminal: step lines, progress, summaries, numbers with units."""
