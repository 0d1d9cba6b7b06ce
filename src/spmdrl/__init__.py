"""RL post-training of large language models as one plain torchrun program."""

__version__ = "0.1.0"
