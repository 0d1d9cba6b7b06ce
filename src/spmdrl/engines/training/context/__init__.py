"""Context parallelism: the tokens of a micro-batch over the context axis, by ring or by exchanging tokens for heads."""
