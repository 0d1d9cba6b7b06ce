"""Small models made by code: random weights and a char-level tokenizer."""
