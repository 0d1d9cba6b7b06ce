"""Controllers: what is true of each row, replicated in every rank from the same metadata."""
