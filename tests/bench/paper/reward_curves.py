"""The paper's Figure 8 in small: rewards over training steps beside another trainer's, in bands of several seeds."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from spmdrl.config.reader import ConfigError
from spmdrl.nouns.statistics import Estimate
from spmdrl.verbs.doctor.commands import run_to_end
from tests.bench.harness.bench_table import BenchTable
from tests.bench.harness.in_turn import in_turn
from tests.bench.harness.train_runs import STEPS_OF_WARM_UP, train_steps
from tests.bench.learning.learning_plot import curves_svg
from tests.bench.learning.learning_runs import LearningCurve

OURS, PEER = "spmdrl", "the other trainer"
NUM_PROMPTS, NUM_GENERATIONS, LENGTH, LEARNING_RATE = 32, 8, 5, 1e-4
NUM_PARTS = 5
"""rows of the table: parts of the run"""
_WINDOW = 10
"""steps of a point of the picture"""
_LONGEST_SECONDS = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--start", type=Path, help="fig8: Hugging Face folder of the model that learns")
    parser.add_argument("--task", type=Path, help="fig8: JSONL file with its prompts and answers")
    peer_help = "fig8: the other trainer's command, which prints `reward` too; {model}, {prompts}, {steps}, {seed}"
    parser.add_argument("--curve-peer", help=peer_help)
    parser.add_argument("--curve-steps", type=int, default=100, help="fig8: steps of each run")
    parser.add_argument("--seeds", type=int, default=3, help="fig8: runs of each")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="fig8: also draw the curves into an SVG file")


def figure8(arguments: argparse.Namespace) -> BenchTable:
    """Train both with each seed in turn. Raises ConfigError without a model, a task and a command."""
    if not (arguments.start and arguments.task and arguments.curve_peer):
        raise ConfigError("--only fig8 needs --start, --task and --curve-peer: a model, its task, the other's command")
    rewards: dict[str, list[list[float]]] = {OURS: [], PEER: []}
    for seed in range(1, arguments.seeds + 1):
        turns = in_turn({OURS: lambda: _ours(arguments, seed), PEER: lambda: _theirs(arguments, seed)}, rounds=1)  # noqa: B023
        for name, turn in turns.items():
            rewards[name] += turn.results
    if arguments.picture is not None:
        arguments.picture.write_text(picture(rewards))
    return table_of(rewards)


def _ours(arguments: argparse.Namespace, seed: int) -> list[float]:
    settings = {
        "model.path": arguments.start,
        "data.train": arguments.task,
        "rollout.prompts_per_step": NUM_PROMPTS,
        "rollout.num_generations": NUM_GENERATIONS,
        "rollout.max_completion_length": LENGTH,
        "optim.lr": LEARNING_RATE,
        "train.max_steps": arguments.curve_steps,
        "seed": seed,
    }
    with tempfile.TemporaryDirectory(prefix="spmdrl-bench-") as folder:
        return [step["reward"] for step in train_steps(Path(folder), settings, num_ranks=1)]


def _theirs(arguments: argparse.Namespace, seed: int) -> list[float]:
    places = {"model": arguments.start, "prompts": arguments.task, "steps": arguments.curve_steps, "seed": seed}
    command = shlex.split(arguments.curve_peer.format(**places))
    lines = run_to_end(command, {**os.environ, "OMP_NUM_THREADS": "1"}, _LONGEST_SECONDS).splitlines()
    records = [json.loads(line) for line in lines if line.startswith("{")]
    return [record["reward"] for record in records if "ete" in record][STEPS_OF_WARM_UP:]


def table_of(rewards: Mapping[str, Sequence[Sequence[float]]]) -> BenchTable:
    """A row per part of the runs, of what each trainer's seeds had in it."""
    num_steps = min(len(run) for runs in rewards.values() for run in runs)
    bounds = [part * num_steps // NUM_PARTS for part in range(NUM_PARTS + 1)]
    rows: list[dict[str, object]] = []
    overlapping = 0
    for first, end in zip(bounds, bounds[1:], strict=False):
        means = {name: [fmean(run[first:end]) for run in runs] for name, runs in rewards.items()}
        overlaps = max(map(min, means.values())) <= min(map(max, means.values()))
        overlapping += overlaps
        bands = {name: f"{fmean(each):.3f} ({min(each):.3f} to {max(each):.3f})" for name, each in means.items()}
        steps = f"{first + 1 + STEPS_OF_WARM_UP} to {end + STEPS_OF_WARM_UP}"
        rows.append({"steps": steps, **bands, "bands overlap": "yes" if overlaps else "no"})
    return BenchTable(
        title=f"Figure 8: mean reward, {len(rewards[OURS])} seeds, {NUM_PROMPTS} prompts x {NUM_GENERATIONS} responses",
        rows=rows,
        notes=(
            "The paper: Qwen2.5-32B on DeepScaleR, 1000 iterations, MSRL's rewards about VeRL's, one run each. Here: a "
            "small model, an exact reward, another baseline; mean (lowest to highest) over the seeds.",
        ),
        details={"here": f"bands overlap in {overlapping} of {NUM_PARTS} parts", "rewards": dict(rewards)},
    )


def picture(rewards: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """One panel with both bands, of means over successive steps."""
    curves = [
        LearningCurve(name, seed, _means(run)) for name, runs in rewards.items() for seed, run in enumerate(runs, 1)
    ]
    return curves_svg({"reward": curves}, caption="mean reward by step; band: all seeds")


def _means(run: Sequence[float]) -> dict[int, Estimate]:
    starts = range(0, len(run) - _WINDOW + 1, _WINDOW)
    values = {start + _WINDOW: fmean(run[start : start + _WINDOW]) for start in starts}
    return {step: Estimate(value, value, value) for step, value in values.items()}
