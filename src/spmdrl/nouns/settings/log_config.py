"""Settings of the log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

BACKENDS = ("console", "jsonl", "tensorboard", "wandb")


@dataclass(frozen=True)
class LogConfig:
    """Destinations of metrics, and the number of samples that are kept to be read."""

    backends: tuple[str, ...] = ("console", "jsonl")
    """any of console, jsonl, tensorboard and wandb; keys of services come from the environment only"""
    samples_per_step: Annotated[int, Ge(0)] | None = None
    """rows per step written to samples.jsonl, which the report shows: those of one prompt first, then others; 0: none;
    null: all responses to one prompt and 4 others"""
    project: str = "spmdrl"
    """the run's project in W&B, which takes group and tags from WANDB_RUN_GROUP and WANDB_TAGS"""

    def __post_init__(self) -> None:
        unknown = [name for name in self.backends if name not in BACKENDS]
        if unknown:
            raise ValueError(f"log.backends names {', '.join(unknown)}, but only {', '.join(BACKENDS)} are there")
        if not self.project.strip():
            raise ValueError("log.project is empty; name a project, such as spmdrl")
