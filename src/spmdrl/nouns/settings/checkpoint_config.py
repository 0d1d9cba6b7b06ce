"""Settings of checkpoints."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

_WALL_TIME = re.compile(r"(?:([0-9]{1,3})-)?([0-9]{1,3}):([0-5][0-9]):([0-5][0-9])")


@dataclass(frozen=True)
class CheckpointConfig:
    """Times of checkpoints, and the number kept."""

    interval: Annotated[int, Ge(0)] = 50
    """steps between checkpoints; 0: only after the last step"""
    keep_last: Annotated[int, Ge(1)] = 2
    """number of newest checkpoints to keep"""
    asynchronous: bool = False
    """write checkpoints in background threads, from copies in the host's memory; a job that dies meanwhile resumes from
    the previous checkpoint"""
    keep_every: Annotated[int, Ge(1)] | None = None
    """distance in steps between checkpoints kept for good; null: none are"""
    keep_rollouts: bool = False
    """keep a step's rewarded rollouts, so that a job that dies in its update, after a checkpoint, can reuse them"""
    model_only: bool = False
    """write the model alone, without the optimizer: a fraction of the bytes, but not enough to resume from"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of the model's weights in checkpoints; auto: the computation's (model.dtype). Resuming doesn't depend on
    it: the trainer's own weights are saved in float32"""
    best: str | None = None
    """metric, such as eval/accuracy or reward, whose best checkpoints are kept, the very best linked as `best`; a
    better eval/ metric is saved even if no checkpoint is due; null: eval/reward with keep_best, else none"""
    keep_best: Annotated[int, Ge(1)] | None = None
    """number of checkpoints with the best values of `best` to keep beside the newest; null: 1 if `best` is set, else
    0"""
    save_by: str | None = None
    """time after its start at which a job saves and exits with code 75, so that the same command can continue it:
    HH:MM:SS or D-HH:MM:SS; null: two minutes before Slurm's time limit, if there is one"""
    best_mode: Literal["max", "min"] = "max"
    """direction of the metric in `best`; max: higher values are better; min: lower ones"""

    def __post_init__(self) -> None:
        if self.save_by is not None and _WALL_TIME.fullmatch(self.save_by) is None:
            raise ValueError(
                f"checkpoint.save_by is {self.save_by!r}, but must be HH:MM:SS or D-HH:MM:SS, such as 11:50:00"
            )
        if self.model_only and self.keep_rollouts:
            raise ValueError(
                "checkpoint.model_only and checkpoint.keep_rollouts are both true, but rollouts are kept for "
                "resuming, which needs the trainer's state; set one of them to false"
            )

    @property
    def save_by_seconds(self) -> float | None:
        """`save_by` in seconds."""
        found = None if self.save_by is None else _WALL_TIME.fullmatch(self.save_by)
        if found is None:
            return None
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)

    @property
    def best_metric(self) -> str | None:
        """Metric that ranks checkpoints; None if none is kept for one."""
        return self.best or (None if self.keep_best is None else "eval/reward")

    @property
    def num_best(self) -> int:
        """Number of checkpoints kept for their values."""
        return self.keep_best or (0 if self.best is None else 1)
