"""Learning by the lag of rollouts: jobs of one rank that trains and one that only generates.

Runs of a task and a seed begin with one supervised start and make equally many steps, with the correction that is the
default with a lag (`algo.rollout_is=tis`) and without one. A run is a job of `spmdrl train`; one that has finished in
--work isn't run again. Accuracies are of greedy held-out answers. A policy's reward is the mean of the batch that it
generated, and a curve the mean of ten successive policies by the steps that the last of them has trained, so that the
age of a batch doesn't pass for slow learning. Steps are counted to a share of the gain of the run without a lag and
with the same seed; a lag's cost is the ratio of both runs' steps, and figures are medians over the seeds.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from spmdrl.config.reader import ConfigError
from spmdrl.nouns.statistics import Estimate
from spmdrl.observability.log import read_metrics
from spmdrl.observability.summary import read_summary
from spmdrl.runtime.screen import show
from tests.bench.harness.bench_table import BenchTable
from tests.bench.learning.learning_plot import curves_svg
from tests.bench.learning.learning_runs import LearningCurve, finish, held_out_accuracies
from tests.bench.learning.recipes import HELD_OUT, QUICKSTART, Settings

WINDOW = 10
"""policies whose batches a mean is over"""
SHARES = (0.5, 0.9)
"""of the gain without a lag, to which steps are counted"""
RULES = ("tis", "none")
_CALCULATOR = Path("configs/recipes/calculator/train.yaml")
_SAVED: Settings = {"checkpoint.interval": 0, "log.backends": "[jsonl]", "resources.device": "cpu"}
_ADDITION: Settings = {"data.eval": HELD_OUT, "train.max_steps": 100}


@dataclass(frozen=True)
class LagTask:
    """A task of the repository's configs, and its settings here."""

    config: Path
    settings: Settings


# The learning rate that the config has for addition is near the largest with which it learns without a lag.
TASKS: Mapping[str, LagTask] = {
    "addition": LagTask(QUICKSTART, _ADDITION),
    "products": LagTask(_CALCULATOR, {"train.max_steps": 40}),
    "half the rate": LagTask(QUICKSTART, _ADDITION | {"optim.lr": 2.5e-4}),
}


@dataclass(frozen=True)
class LagRun:
    """A finished run."""

    task: str
    seed: int
    lag: int
    rule: str
    rewards: dict[int, float]
    """means over a window of policies, by the steps that its last one has trained"""
    before: float
    accuracy: float
    capped: float
    """share of trained tokens whose weight is the correction's bound"""

    @property
    def curve(self) -> LearningCurve:
        """A point per window."""
        points = {num: mean for num, mean in self.rewards.items() if num % WINDOW == 0}
        return LearningCurve(f"lag {self.lag}", self.seed, {num: Estimate(x, x, x) for num, x in points.items()})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), metavar="NAME", help=f"of {'; '.join(TASKS)}")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], metavar="SEED")
    parser.add_argument("--lags", nargs="+", type=int, default=[1, 2, 4], metavar="LAG", help="beside 0")
    work_help = "folder of the runs; those that have finished there with the same settings are not run again"
    parser.add_argument("--work", type=Path, default=Path("runs/bench_lags"), metavar="FOLDER", help=work_help)
    parser.add_argument("--finished", action="store_true", help="run nothing: only show the runs that have finished")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also draw the curves into an SVG file")


def run(arguments: argparse.Namespace) -> BenchTable:
    """Run what has not been run. Raises ConfigError for a task that isn't there, RuntimeError if a run fails."""
    if unknown := [name for name in arguments.tasks if name not in TASKS]:
        raise ConfigError(f"--tasks {unknown[0]!r} isn't one of {', '.join(TASKS)}")
    runs = []
    for task in arguments.tasks:
        for seed in arguments.seeds:
            for lag, rule in ((0, "none"), *((lag, rule) for rule in RULES for lag in arguments.lags)):
                if arguments.finished and not _has_finished(run_folder(task, seed, lag, rule, arguments.work)):
                    continue
                runs.append(_trained(task, seed, lag, rule, arguments.work.resolve()))
                show(f"{task}, seed {seed}, lag {lag}, {rule}: {runs[-1].accuracy:.3f}", stream=sys.stderr)
    if arguments.picture is not None:
        panels = {
            f"{task}, {rule}": [run.curve for run in runs if run.task == task and (run.lag == 0 or run.rule == rule)]
            for task in dict.fromkeys(run.task for run in runs)
            for rule in RULES
        }
        caption = "mean reward of sampled responses by trained steps; line: mean of the seeds; band: lowest to highest"
        arguments.picture.write_text(curves_svg(panels, caption=caption))
    return BenchTable(
        title=f"bench lags: 1 + 1 ranks, seeds {', '.join(map(str, arguments.seeds))}",
        rows=table_rows(runs),
        details={"runs": [vars(run) for run in runs]},
    )


def _has_finished(folder: Path) -> bool:
    return read_summary(folder).get("verdict") == "done"


def _trained(task: str, seed: int, lag: int, rule: str, work: Path) -> LagRun:
    config, start, folder = TASKS[task].config, start_folder(task, seed, work), run_folder(task, seed, lag, rule, work)
    finish("sft", start, start_settings(seed), configs=[config])
    finish("train", folder, run_settings(task, seed, lag, rule, start), configs=[config], num_ranks=2)
    steps = [metrics for _, metrics in read_metrics(folder) if "reward" in metrics]
    capped = fmean(step.get("rollout_is/clipped_share", 0.0) for step in steps)
    before, *_, after = (found.value for found in held_out_accuracies(folder).values())
    return LagRun(task, seed, lag, rule, by_policy([step["reward"] for step in steps], lag), before, after, capped)


def start_folder(task: str, seed: int, work: Path) -> Path:
    return work / f"start-{TASKS[task].config.parent.name}-{seed}"


def run_folder(task: str, seed: int, lag: int, rule: str, work: Path) -> Path:
    return work / f"{task.replace(' ', '_')}-{seed}-lag-{lag}-{rule}"


def start_settings(seed: int) -> Settings:
    return {**_SAVED, "data.eval": "null", "seed": seed}


def run_settings(task: str, seed: int, lag: int, rule: str, start: Path) -> Settings:
    apart = {"resources.ranks.generation": 1, "rollout.lag": lag, "algo.rollout_is": rule}
    return {**_SAVED, **TASKS[task].settings, **apart, "model.make": "null", "model.path": start, "sft.max_steps": 0,
            "seed": seed}  # fmt: skip


def by_policy(rewards: Sequence[float], lag: int) -> dict[int, float]:
    """Mean rewards over windows of policies, from the mean reward of each step's batch, the first step's first."""
    batches: dict[int, list[float]] = {}
    for step, reward in enumerate(rewards):
        batches.setdefault(max(0, step - lag), []).append(reward)
    of_policy = [fmean(found) for found in batches.values()]
    return {num: fmean(of_policy[max(0, num + 1 - WINDOW) : num + 1]) for num in range(len(of_policy))}


def steps_to(share: float, run: LagRun, others: Sequence[LagRun]) -> float:
    """Steps until a run had this share of the gain without a lag; inf: never. `others` have its task and its seed."""
    # The largest lag has the most batches of the start.
    start = max(others, key=lambda other: other.lag).rewards[0]
    end = list(without_lag(others).rewards.values())[-1]
    goal = start + share * (end - start)
    return next((num for num, mean in run.rewards.items() if num and mean >= goal), math.inf)


def without_lag(runs: Sequence[LagRun]) -> LagRun:
    return next(run for run in runs if run.lag == 0)


def table_rows(runs: Sequence[LagRun]) -> list[dict[str, object]]:
    """One row per task, lag and correction."""
    rows = []
    for task, lag, rule in dict.fromkeys((run.task, run.lag, run.rule) for run in runs):
        group = [run for run in runs if (run.task, run.lag, run.rule) == (task, lag, rule)]
        siblings = [[other for other in runs if (other.task, other.seed) == (task, run.seed)] for run in group]
        accuracies = [run.accuracy for run in group]
        row: dict[str, object] = {
            "task": task, "lag": lag, "correction": rule, "seeds": len(group),
            "before": fmean(run.before for run in group), "accuracy": fmean(accuracies),
            "lowest": min(accuracies), "highest": max(accuracies), "capped": fmean(run.capped for run in group),
        }  # fmt: skip
        for share in SHARES:
            needed = [steps_to(share, run, others) for run, others in zip(group, siblings, strict=True)]
            first = [steps_to(share, without_lag(others), others) for others in siblings]
            cost = median(steps / least for steps, least in zip(needed, first, strict=True))
            row |= {f"to {share:.0%}": _finite(median(needed)), f"cost, {share:.0%}": _finite(cost)}
        rows.append(row)
    return rows


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
