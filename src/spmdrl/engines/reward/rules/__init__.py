"""The built-in reward rules: where a text states its final answer, and whether that equals a reference."""
