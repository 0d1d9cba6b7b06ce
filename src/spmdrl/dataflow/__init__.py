"""Layer 3: what moves, when, and who waits for it."""
