"""The checkpoints with the best values of a metric, and the link to the best."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spmdrl.engines.training.checkpoints.manifest import step_folder_name
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.nouns.settings.checkpoint_config import CheckpointConfig

LINK = "best"
EVALUATIONS = "eval/"


@dataclass(frozen=True)
class BestStep:
    """A step with one of the best values of a metric so far."""

    metric: str
    step: int
    value: float


def best_of(
    config: CheckpointConfig, best: Sequence[BestStep], step: int, metrics: Mapping[str, float]
) -> tuple[BestStep, ...]:
    """Return the `checkpoint.keep_best` best steps, best first, including a new one.

    Among equal ones the earlier comes first. A step without the metric, or with NaN, is excluded, and so is one by
    another metric.
    """
    value = math.nan if config.best_metric is None else metrics.get(config.best_metric, math.nan)
    steps = [one for one in best if one.metric == config.best_metric]
    if config.best_metric is not None and not math.isnan(value):
        steps.append(BestStep(config.best_metric, step, value))
    sign = 1 if config.best_mode == "max" else -1
    return tuple(sorted(steps, key=lambda one: (-sign * one.value, one.step))[: config.num_best])


def is_due_for_best(
    config: CheckpointConfig, best: Sequence[BestStep], step: int, metrics: Mapping[str, float]
) -> bool:
    """Return True for a step to save because of its value: evaluations are too rare to coincide with checkpoints."""
    is_evaluation = config.best_metric is not None and config.best_metric.startswith(EVALUATIONS)
    return is_evaluation and any(one.step == step for one in best_of(config, best, step, metrics))


def point_to(best: BestStep, root: Path) -> None:
    """Point the link `best` at a step's folder, which must exist; a reader finds the old target or the new one."""
    link, aside = root / LINK, root / f".{LINK}.new"
    aside.unlink(missing_ok=True)
    aside.symlink_to(step_folder_name(best.step))
    os.replace(aside, link)


def unknown_metric(name: str, metrics: Mapping[str, float]) -> str | None:
    """Return a warning about a metric that no saved step has; None for an evaluation's before the first one."""
    if name.startswith(EVALUATIONS) and not any(known.startswith(EVALUATIONS) for known in metrics):
        return None
    near = difflib.get_close_matches(name, metrics, 3, 0.5)
    advice = f"did you mean {' or '.join(near)}?" if near else f"the metrics are {', '.join(sorted(metrics))}"
    return f"WARNING: checkpoint.best is {name}, but no step so far has that metric, so none is kept for it; {advice}"


def check_best(checked: CheckedRun) -> None:
    """Refuse to keep checkpoints by a metric of evaluations that aren't made between steps. Raises ValueError."""
    config = checked.config
    metric = config.checkpoint.best_metric
    if metric is None or not metric.startswith(EVALUATIONS):
        return
    lacking = "data.eval is not set" if config.data.eval is None else "eval.interval is 0"
    if config.data.eval is None or config.eval.interval == 0:
        key = "keep_best" if config.checkpoint.best is None else "best"
        raise ValueError(
            f"checkpoint.{key} is {getattr(config.checkpoint, key)}, which keeps the best checkpoints by {metric}, but "
            f"{lacking}, so that steps aren't evaluated; set data.eval and eval.interval, or checkpoint.best to a "
            "metric of every step, such as reward"
        )
