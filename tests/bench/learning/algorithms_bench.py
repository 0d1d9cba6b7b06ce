"""Each algorithm and model family trained on a task of a minute, with held-out accuracy before and after.

The task is addition, the model of 1.0M parameters made by code, and the checkpoint a supervised start of about half
the answers right. All algorithms have the same prompts, responses and updates, and the values of their papers. A run
is a job of `spmdrl train`; one that has finished in --work isn't run again. An interval is of 95%, around the accuracy
after; six algorithms must improve by more than its whole width, and a student must reach 95% of the accuracy of its
teacher, the first run of gspo. The verbs `preferences` and `reward-model` learn from pairs of a right and a wrong sum,
and must order more than 90% of the held-out pairs. Model families begin with random weights on two ranks, have a
supervised start of their own and learn by partial rollout; all must improve as the six algorithms must.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean

from spmdrl.algorithms.table import ALGORITHMS
from spmdrl.config.reader import ConfigError
from spmdrl.runtime.screen import show
from tests.bench.harness.bench_table import BenchTable
from tests.bench.learning.learning_plot import curves_svg
from tests.bench.learning.learning_runs import LearningCurve, curve_of, held_out_accuracies
from tests.bench.learning.recipes import FAMILIES, NUM_HELD_OUT, PAIR_VERBS, TEACHER, recipe_of

CHIEF = ("ppo", "dapo", "pf_ppo", "rloo", "gspo", "online_dpo", *FAMILIES)
"""the algorithms and families that have three seeds by default, and must improve"""
SHARE_OF_TEACHER = 0.95
"""of a teacher's accuracy, what its student must reach"""
ENOUGH_PAIRS = 0.9
"""of the held-out pairs, what a verb that learns from pairs must order rightly"""
_NAMES = [*(config.name for config in ALGORITHMS), *PAIR_VERBS, *FAMILIES]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    algorithms_help = f"all unless given: {', '.join(_NAMES)}"
    parser.add_argument("--algorithms", nargs="+", default=_NAMES, metavar="NAME", help=algorithms_help)
    parser.add_argument(
        "--seeds", type=int, help=f"runs of each; unless given, 3 of {', '.join(CHIEF)} and 1 of others"
    )
    parser.add_argument("--steps", type=int, default=30, help="training steps of each run")
    work_help = "folder of the runs; those that have finished there with the same settings are not run again"
    parser.add_argument("--work", type=Path, default=Path("runs/bench_algorithms"), metavar="FOLDER", help=work_help)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also draw the curves into an SVG file")


def run(arguments: argparse.Namespace) -> BenchTable:
    """Run what has not been run. Raises ConfigError for what can't be, RuntimeError if a run fails."""
    _check(arguments)
    work, curves = arguments.work.resolve(), []
    for algorithm in dict.fromkeys(arguments.algorithms):
        for seed in range(arguments.seeds or (3 if algorithm in CHIEF else 1)):
            curve = curve_of(algorithm, seed, work=work, num_steps=arguments.steps)
            show(f"{algorithm}, seed {seed}: {curve.before:.3f} -> {curve.after.value:.3f}", stream=sys.stderr)
            curves.append(curve)
    grouped = {name: list(group) for name, group in groupby(curves, key=lambda curve: curve.algorithm)}
    if arguments.picture is not None:
        arguments.picture.parent.mkdir(parents=True, exist_ok=True)
        arguments.picture.write_text(curves_svg(grouped))
    teachers = {name: _teacher_accuracy(work) if recipe_of(name).needs_teacher else None for name in grouped}
    return BenchTable(
        title=f"bench algorithms: {NUM_HELD_OUT} held-out prompts, greedy, before and after {arguments.steps} steps",
        rows=[_row(curve) for curve in curves],
        notes=tuple(_note(name, group, teachers[name]) for name, group in grouped.items()),
        details={"curves": [_points(curve) for curve in curves], "teachers": teachers},
        passed=all(_has_passed(name, group, teachers[name]) for name, group in grouped.items()),
    )


def _check(arguments: argparse.Namespace) -> None:
    unknown = [name for name in arguments.algorithms if name not in _NAMES]
    if unknown:
        raise ConfigError(f"--algorithms {unknown[0]} isn't one of {', '.join(_NAMES)}")
    for name in ("seeds", "steps"):
        number = getattr(arguments, name)
        if number is not None and number < 1:
            raise ConfigError(f"--{name} is {number}, but must be at least 1")


def _row(curve: LearningCurve) -> dict[str, object]:
    return {
        "algorithm": curve.algorithm,
        "seed": curve.seed,
        "accuracy_before": round(curve.before, 4),
        "accuracy_after": round(curve.after.value, 4),
        "interval": [round(curve.after.low, 4), round(curve.after.high, 4)],
    }


def _note(name: str, curves: Sequence[LearningCurve], teacher: float | None) -> str:
    gains = [curve.gain for curve in curves]
    clear = sum(curve.is_clear for curve in curves)
    spread = f" ({min(gains):+.3f} to {max(gains):+.3f})" if len(gains) > 1 else ""
    note = f"{name}: {fmean(gains):+.3f}{spread}, by more than its interval in {clear} of {len(gains)} runs"
    if name in PAIR_VERBS:
        note += "; accuracies are of ordering pairs"
    if teacher is None:
        return note
    return f"{note}; it reaches {_mean_after(curves):.3f}, its teacher {teacher:.3f}"


def _has_passed(name: str, curves: Sequence[LearningCurve], teacher: float | None) -> bool:
    if name in PAIR_VERBS:
        return _mean_after(curves) > ENOUGH_PAIRS
    is_student = teacher is None or _mean_after(curves) >= SHARE_OF_TEACHER * teacher
    return is_student and (name not in CHIEF or all(curve.is_clear for curve in curves))


def _teacher_accuracy(work: Path) -> float:
    return list(held_out_accuracies(work / f"{TEACHER}-0").values())[-1].value


def _mean_after(curves: Sequence[LearningCurve]) -> float:
    return fmean(curve.after.value for curve in curves)


def _points(curve: LearningCurve) -> dict[str, object]:
    accuracies = {step: estimate.value for step, estimate in curve.accuracies.items()}
    return {"algorithm": curve.algorithm, "seed": curve.seed, "held_out_accuracy_by_step": accuracies}
