"""Memory of a rank over a step, with and without the swap."""
