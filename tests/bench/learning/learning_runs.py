"""Runs that are made once: each is a job of the command line, and one that has finished isn't run again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spmdrl.nouns.statistics import Estimate
from spmdrl.observability.log import read_metrics
from spmdrl.observability.summary import read_summary
from tests.bench.harness.train_runs import run_verb, words_of
from tests.bench.learning.recipes import (
    FAMILIES,
    PAIR_VERBS,
    QUICKSTART,
    SHARED,
    START,
    TEACHER,
    Settings,
    recipe_of,
)

START_FOLDER = "start"
_EVALUATIONS_OF_A_RUN = 5


@dataclass(frozen=True)
class LearningCurve:
    """Held-out accuracy by step; the first is that before the first step."""

    algorithm: str
    seed: int
    accuracies: dict[int, Estimate]

    @property
    def before(self) -> float:
        return self.accuracies[min(self.accuracies)].value

    @property
    def after(self) -> Estimate:
        return self.accuracies[max(self.accuracies)]

    @property
    def gain(self) -> float:
        return self.after.value - self.before

    @property
    def is_clear(self) -> bool:
        """Whether it improved by more than the whole width of the interval around what it reached."""
        return self.gain > self.after.high - self.after.low


def curve_of(algorithm: str, seed: int, *, work: Path, num_steps: int) -> LearningCurve:
    """Train from the work folder's checkpoint, unless that has been done. Raises RuntimeError if a run fails.

    In place of an algorithm it may be a verb that learns from pairs, which makes steps of its own number, or a model
    family, which makes quickstart's from nothing.
    """
    folder = work / f"{algorithm}-{seed}"
    if algorithm in FAMILIES:
        finish("train", folder, {**FAMILIES[algorithm], "seed": seed}, configs=[QUICKSTART], num_ranks=2)
        return LearningCurve(algorithm, seed, held_out_accuracies(folder))
    finish("sft", work / START_FOLDER, START)
    if algorithm in PAIR_VERBS:
        finish(algorithm, folder, {**PAIR_VERBS[algorithm], "model.path": work / START_FOLDER, "seed": seed})
        return LearningCurve(algorithm, seed, held_out_accuracies(folder))
    if recipe_of(algorithm).needs_teacher:
        curve_of(TEACHER, 0, work=work, num_steps=num_steps)
    finish("train", folder, settings_of(algorithm, seed, work=work, num_steps=num_steps))
    return LearningCurve(algorithm, seed, held_out_accuracies(folder))


def settings_of(algorithm: str, seed: int, *, work: Path, num_steps: int) -> Settings:
    """What the run of an algorithm is started with."""
    recipe = recipe_of(algorithm)
    num_steps *= recipe.times_steps
    return {
        **SHARED,
        "model.path": work / START_FOLDER,
        **({"teacher.path": work / f"{TEACHER}-0"} if recipe.needs_teacher else {}),
        "algo.name": algorithm,
        "optim.lr": recipe.lr,
        "train.max_steps": num_steps,
        "eval.interval": -(-num_steps // _EVALUATIONS_OF_A_RUN),
        "seed": seed,
        **recipe.settings,
    }


def finish(verb: str, folder: Path, settings: Settings, *, configs: Sequence[Path] = (), num_ranks: int = 1) -> None:
    """Run a verb in this folder from its beginning, unless it has finished there with the same settings."""
    words = words_of(verb, settings, folder)
    summary = read_summary(folder)
    command = shlex.split(summary.get("command") or "")
    if summary.get("verdict") == "done" and command[-len(settings) :] == words[-len(settings) :]:
        return
    # Another run that lies there is moved aside.
    run_verb([verb, *map(str, configs), "resume=never", *words[1:]], num_ranks=num_ranks)


def held_out_accuracies(folder: Path) -> dict[int, Estimate]:
    """By step, what a run's evaluations found."""
    name = "eval/accuracy"
    return {
        step: Estimate(metrics[name], metrics[f"{name}_low"], metrics[f"{name}_high"])
        for step, metrics in read_metrics(folder)
        if name in metrics
    }
