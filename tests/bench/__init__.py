"""One file per table or figure that we claim."""
