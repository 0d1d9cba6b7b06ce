"""Plain decoders on packed tokens, with Hugging Face weight names; no collectives, no ranks."""
