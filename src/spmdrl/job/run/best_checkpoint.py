"""The checkpoint with the best value of a metric: which it is, and the link that leads to it."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spmdrl.engines.training.checkpoints.checkpoint import CheckpointConfig
from spmdrl.engines.training.checkpoints.manifest import step_folder_name

LINK = "best"
_EVALUATIONS = "eval/"


@dataclass(frozen=True)
class BestStep:
    """The step with the best value of a metric so far."""

    metric: str
    step: int
    value: float


def better_of(
    config: CheckpointConfig, best: BestStep | None, step: int, metrics: Mapping[str, float]
) -> BestStep | None:
    """The best step, now that there is another one; of equal ones the earlier. NaN is never better."""
    value = metrics.get(config.best) if config.best is not None else None
    if config.best is None or value is None or math.isnan(value):
        return best
    sign = 1 if config.best_mode == "max" else -1
    is_better = best is None or best.metric != config.best or sign * value > sign * best.value
    return BestStep(config.best, step, value) if is_better else best


def is_due_for_best(config: CheckpointConfig, best: BestStep | None, step: int, metrics: Mapping[str, float]) -> bool:
    """Whether a step is saved for its value alone: evaluations are too rare to coincide with checkpoints."""
    is_evaluation = config.best is not None and config.best.startswith(_EVALUATIONS)
    return is_evaluation and better_of(config, best, step, metrics) != best


def point_to(best: BestStep, root: Path) -> None:
    """Point the link `best` at a step's folder, which must exist; a reader finds the old target or the new one."""
    link, aside = root / LINK, root / f".{LINK}.new"
    aside.unlink(missing_ok=True)
    aside.symlink_to(step_folder_name(best.step))
    os.replace(aside, link)


def unknown_metric(name: str, metrics: Mapping[str, float]) -> str:
    """The warning about a metric that no saved step has."""
    near = difflib.get_close_matches(name, metrics, 3, 0.5)
    advice = f"did you mean {' or '.join(near)}?" if near else f"the metrics are {', '.join(sorted(metrics))}"
    return f"WARNING: checkpoint.best is {name}, but no step so far has that metric, so none is kept for it; {advice}"
