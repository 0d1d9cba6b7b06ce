"""Steps of the calculator's recipe, with a session per row beside the calculator that keeps none.

Both answer alike, so that rows, losses and weights are the same, which their digests show. The recipe's supervised
start and its training are shortened, evaluations left out. Runs are made in turn, and of each step the seconds are
those of its fastest round, as other work on the machine only adds to them; their sums over the steps are compared, also
for generation alone. The first step of a run isn't counted.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.bench.harness.bench_table import BenchTable
from tests.bench.harness.in_turn import in_turn
from tests.bench.harness.train_runs import check_steps, train_steps
from tests.bench.training.fusion import digests

RECIPE = Path(__file__).parents[3] / "configs" / "recipes" / "calculator" / "train.yaml"
_SESSIONS = """
from spmdrl.engines.environment.calculator import Calculator
from spmdrl.engines.environment.episode import Episode

class Calculators:
    def open(self, row):
        return Session(row)

class Session:
    def __init__(self, row):
        self.row, self.responses = row, []

    def step(self, turn):
        self.responses.append(turn.response)
        return Calculator().step(Episode(self.row.prompt, self.row.columns, self.row.seed, (), turn.response))
"""
Trained = tuple[list[dict[str, float]], tuple[str, ...]]
"""Metrics of a run's steps, and its digests."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--start", type=int, default=40, help="steps of the supervised start")
    parser.add_argument("--steps", type=int, default=6, help="steps of each run, the first of which is not counted")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step, of 8 responses each")
    parser.add_argument("--rows", type=int, default=20_000, help="of the task; a job reads all of them when it starts")
    parser.add_argument("--rounds", type=int, default=5, help="how often both run in turn")


def recipe_of(num_rows: int) -> dict[str, dict[str, Any]]:
    """The recipe's sections, with so many rows of its task."""
    sections = yaml.safe_load(RECIPE.read_text())
    sections["data"]["train"] = re.sub(r"count=\d+", f"count={num_rows}", sections["data"]["train"])
    return sections


def run(arguments: argparse.Namespace) -> BenchTable:
    """Train with both in turn. Raises RuntimeError with the end of a run's stderr if it fails."""
    check_steps(arguments.steps)
    with tempfile.TemporaryDirectory(prefix="spmdrl-bench-") as name:
        folder = Path(name)
        (folder / "calculators.py").write_text(_SESSIONS)
        functions = {"none": "calculator", "sessions": f"{folder / 'calculators.py'}:Calculators"}
        runs = {
            kind: functools.partial(_train, arguments, folder / "run", function) for kind, function in functions.items()
        }
        found = {kind: turn.results for kind, turn in in_turn(runs, arguments.rounds).items()}
    steps = {kind: [steps for steps, _ in results] for kind, results in found.items()}
    ratios = {ratio: sum(fastest(steps["sessions"], name)) / sum(fastest(steps["none"], name)) for ratio, name in
              (("sessions_vs_none", "time/step"), ("generation_vs_none", "time/generation"))}  # fmt: skip
    equal = len({digest for results in found.values() for _, digest in results}) == 1
    return BenchTable(
        title=f"bench sessions: the calculator's recipe, {arguments.ranks} ranks, {arguments.rounds} rounds",
        rows=[{"environment": kind, **_figures(results), "equal": equal} for kind, results in found.items()],
        notes=(", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items()),),
        details={"ratios": ratios},
        passed=equal,
    )  # fmt: skip


def _figures(results: Sequence[Trained]) -> dict[str, float]:
    names = {"step s": "time/step", "generation s": "time/generation", "turns": "environment/turns",
             "call s": "environment/seconds", "open s": "environment/open_seconds"}  # fmt: skip
    steps = [steps for steps, _ in results]
    return {shown: statistics.mean(fastest(steps, name)) for shown, name in names.items()}


def fastest(rounds: Sequence[Sequence[dict[str, float]]], name: str) -> list[float]:
    """The least value of each step over the rounds."""
    return [min(step.get(name, 0.0) for step in same) for same in zip(*rounds, strict=True)]


def _train(arguments: argparse.Namespace, folder: Path, function: str) -> Trained:
    recipe = {section: json.dumps(settings) for section, settings in recipe_of(arguments.rows).items()}
    settings = recipe | {
        "environment.function": function, "sft.max_steps": arguments.start, "train.max_steps": arguments.steps,
        "rollout.prompts_per_step": arguments.prompts, "data.eval": "null", "checkpoint.interval": arguments.steps,
        "resources.device": "cpu",
    }  # fmt: skip
    steps = train_steps(folder, settings, num_ranks=arguments.ranks)
    digest = digests(folder, steps, arguments.steps, ("loss", "grad_norm", "reward"))
    shutil.rmtree(folder)
    return steps, digest
