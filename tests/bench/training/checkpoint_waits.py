"""How long training waits for its checkpoints, copied and written meanwhile, beside `checkpoint.asynchronous=false`.

A model with random weights is trained both ways in turn, with a checkpoint after every other step. A wait is a whole
save as its step sees it, from `checkpoints.jsonl`: gathers, copies, and what is left of the save before. The first
save, which takes the memory for its copies, and the last one, for which a run always waits, aren't counted. `share` is
the median wait, in parts of the median step after which nothing is written.

`slower` is the median step during which threads write, in parts of the same step: what they take from the processor.
Weights, optimizer and rows of the last checkpoint are compared by their digests.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spmdrl.config.reader import ConfigError
from tests.bench.harness.bench_table import BenchTable
from tests.bench.harness.in_turn import in_turn
from tests.bench.harness.train_runs import STEPS_OF_WARM_UP, train_steps

_INTERVAL = 2
_FEWEST_STEPS = 8
_GOAL = 0.05


@dataclass(frozen=True)
class SavingRun:
    """What was measured in one run."""

    waits: list[float]
    """seconds, by save"""
    plain_steps: list[float]
    """seconds of steps that follow no save"""
    steps_behind: list[float]
    """seconds of steps that follow one"""
    num_bytes: int
    digests: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--width", type=int, default=256, help="of the model, which has 6 layers; 256: 5M parameters")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a step, with 4 responses each")
    parser.add_argument("--length", type=int, default=48, help="most tokens of a response")
    parser.add_argument("--steps", type=int, default=12, help="steps of each run")
    parser.add_argument("--rounds", type=int, default=1, help="how often all run in turn")


def run(arguments: argparse.Namespace) -> BenchTable:
    """Train both ways in turn. Raises RuntimeError with the end of a run's stderr if it fails."""
    if arguments.steps < _FEWEST_STEPS:
        raise ConfigError(f"--steps {arguments.steps} leaves too few saves to compare; give at least {_FEWEST_STEPS}")
    with tempfile.TemporaryDirectory(prefix="spmdrl-bench-") as name:
        runs = {
            (ranks, is_on): functools.partial(_train, arguments, Path(name), num_ranks=ranks, asynchronous=is_on)
            for ranks in arguments.ranks
            for is_on in (True, False)
        }
        found = {key: turn.results for key, turn in in_turn(runs, arguments.rounds).items()}
    rows = [_row(ranks, found[ranks, True], found[ranks, False]) for ranks in arguments.ranks]
    return BenchTable(
        title=f"bench checkpoints: a model of width {arguments.width}, {arguments.prompts} prompts x 4 responses",
        rows=rows,
        notes=(f"the goal is a share of at most {_GOAL}",),
        details={"ratios": {"share": max(float(str(row["share"])) for row in rows)}},
        passed=all(bool(row["equal"]) for row in rows),
    )


def _row(ranks: int, behind: Sequence[SavingRun], waited: Sequence[SavingRun]) -> dict[str, object]:
    plain = statistics.median(one for run in (*behind, *waited) for one in run.plain_steps)
    waits = [statistics.median(one for run in runs for one in run.waits) for runs in (behind, waited)]
    return {
        "ranks": ranks,
        "MB": behind[0].num_bytes / 1e6,
        "step s": plain,
        "wait s": waits[0],
        "share": waits[0] / plain,
        "slower": statistics.median(one for run in behind for one in run.steps_behind) / plain,
        "synchronous wait s": waits[1],
        "synchronous share": waits[1] / plain,
        "equal": len({run.digests for run in (*behind, *waited)}) == 1,
    }


def _train(arguments: argparse.Namespace, inputs: Path, *, num_ranks: int, asynchronous: bool) -> SavingRun:
    """One run of the `train` verb."""
    shape = {"hidden_size": arguments.width, "num_hidden_layers": 6, "num_attention_heads": 4,
             "num_key_value_heads": 2,
             "intermediate_size": 3 * arguments.width, "max_position_embeddings": 16 + arguments.length}  # fmt: skip
    settings: dict[str, object] = {
        "model.make": json.dumps(shape | {"chars": "0123456789+=<>"}),
        "data.train": "synthetic://addition?low=0&high=99&count=400",
        "rollout.prompts_per_step": arguments.prompts,
        "rollout.num_generations": 4,
        "rollout.max_completion_length": arguments.length,
        "train.max_steps": arguments.steps,
        "checkpoint.interval": _INTERVAL,
        "checkpoint.asynchronous": str(asynchronous).lower(),
        "eval.before_train": "false",
        "reshard.swap": "never",
        "resources.device": "cpu",
    }
    folder = inputs / "run"
    steps = train_steps(folder, settings, num_ranks=num_ranks, environment={})
    saves = [json.loads(line) for line in (folder / "checkpoints.jsonl").read_text().splitlines()]
    seconds = {number: step["time/step"] for number, step in enumerate(steps, 1 + STEPS_OF_WARM_UP)}
    found = SavingRun(
        [save["seconds"] for save in saves[1:-1]],
        [one for number, one in seconds.items() if number % _INTERVAL == 0],
        [one for number, one in seconds.items() if number % _INTERVAL and number > _INTERVAL],
        saves[-1]["bytes"],
        _digests(folder / f"checkpoints/step_{arguments.steps:06d}"),
    )
    shutil.rmtree(folder)
    return found


def _digests(checkpoint: Path) -> tuple[str, ...]:
    files = [*checkpoint.rglob("*.safetensors"), checkpoint / "samples.json"]
    return tuple(hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files))
