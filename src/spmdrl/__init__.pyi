"""Types of what `spmdrl` imports when it is used."""

from spmdrl.library import Policy, RunRecord, evaluate, generate, read_run, train

__version__: str
__all__ = ["Policy", "RunRecord", "evaluate", "generate", "read_run", "train"]
