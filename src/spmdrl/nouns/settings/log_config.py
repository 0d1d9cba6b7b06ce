"""Settings of the log."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge

from spmdrl.nouns.settings.alert_rule import read_rules

BACKENDS = ("console", "jsonl", "tensorboard", "wandb", "trackio", "mlflow")


@dataclass(frozen=True)
class LogConfig:
    """Destinations of metrics, and the number of samples to keep for reading."""

    backends: tuple[str, ...] = ("console", "jsonl")
    """destinations: console, jsonl, tensorboard, wandb, trackio, mlflow, or classes as pkg.mod:Class or file.py:Class;
    keys of services come from the environment only"""
    samples_per_step: Annotated[int, Ge(0)] | None = None
    """rows per step written to samples.jsonl, for the report: one prompt's first, then others; 0: none; null: all
    responses to one prompt and 4 others"""
    project: str = "spmdrl"
    """project in W&B and Trackio, experiment in MLflow; W&B's group and tags come from WANDB_RUN_GROUP and
    WANDB_TAGS"""
    alerts: dict[str, str] = field(default_factory=dict)
    """rules beside the default ones, by metric, such as {entropy: '< 0.05', kl: '> 0.2 for 3'}; never after a symptom,
    such as {answers-truncated: never}, switches its default rule off (docs/metrics.md)"""
    alert_command: tuple[str, ...] = ()
    """program and arguments to run at each alert, with the message as its last argument; it is ended after 30 s"""

    def __post_init__(self) -> None:
        unknown = [name for name in self.backends if name not in BACKENDS and ":" not in name]
        if unknown:
            raise ValueError(
                f"log.backends names {', '.join(unknown)}, but must name some of {', '.join(BACKENDS)}, or a class as "
                "pkg.mod:Class"
            )
        if not self.project.strip():
            raise ValueError("log.project is empty; name a project, such as spmdrl")
        read_rules(self.alerts)
