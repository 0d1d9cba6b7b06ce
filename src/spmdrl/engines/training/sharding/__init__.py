"""This rank's shards of a decoder: FSDP2 units around plain modules, and gradients added up over axes."""
