"""The verbs that run a config: train, sft, eval, generate, check."""
