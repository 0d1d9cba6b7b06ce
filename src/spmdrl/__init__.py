"""RL post-training of large language models as one plain torchrun program."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = ["Policy", "RunRecord", "evaluate", "generate", "read_run", "train"]


def __getattr__(name: str) -> Any:
    # What computes is imported when it is first used: `import spmdrl` takes no PyTorch.
    if name not in __all__:
        raise AttributeError(f"module 'spmdrl' has no attribute {name!r}")
    return getattr(import_module("spmdrl.library"), name)
