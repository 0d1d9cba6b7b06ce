"""Runs with random delays on every rank, which must have the bits of a run without any.

A delay is up to ten times as long as a stage of these small jobs takes, at about every fourth fault point that a rank
passes: in its data, dock, engine, rewards, passes, optimizer, switches and checkpoints.
"""

from __future__ import annotations

import os
import random
import time
from functools import partial
from pathlib import Path

from spmdrl.observability import fault_points
from tests.bench.faults.fault_jobs import difference, outcome_of
from tests.bench.harness.bench_table import BenchTable
from tests.support.jobs import inline_config, metrics_of, run_job

MOST_SECONDS = 0.2
_STEPS = 6
_LAGS = (1, 2, 4)
_SETS = ((2, 1), (3, 1), (4, 2))
"""ranks, and how many of them generate"""
_KINDS = {
    "plain": (),
    "calculator": ("environment.function=calculator", "rollout.stop=['=']"),
    "weights in flight": ("rollout.swap_in_flight=4",),
    "several steps": ("rollout.partial_max_rounds=3",),
    "critic": ("critic={}", "algo={name: ppo, kl_coef: 0.1}"),
}


def delay_at_random(seed: int, most_seconds: float = MOST_SECONDS) -> None:
    """Let this rank sleep at about every fourth fault point that it passes, another time each."""
    draw = random.Random(f"{seed}/{os.environ.get('RANK')}")  # noqa: S311 - no secret

    def sleep(name: str, *values: object) -> None:
        if draw.random() < 0.25:
            time.sleep(draw.random() * most_seconds)

    fault_points.hook = sleep


def delays(root: Path, num_runs: int, only: str | None = None) -> BenchTable:
    """So many delayed runs in equal shares of lags, sets and kinds of steps. Raises RuntimeError if a run fails."""
    cells = [(lag, *ranks, kind) for kind in (only.split(",") if only else _KINDS) for lag in _LAGS for ranks in _SETS]
    rows = []
    for index, (lag, ranks, generating, kind) in enumerate(cells):
        # What is over goes to the first cells, whose runs are the shortest.
        share = num_runs // len(cells) + (index < num_runs % len(cells))
        if not share:
            continue
        settings = (
            *_KINDS[kind], f"rollout.lag={lag}", f"resources.ranks.generation={generating}",
            f"train.max_steps={_STEPS}", "checkpoint.interval=2", "checkpoint.keep_last=9", "resources.device=cpu",
        )  # fmt: skip
        whole, seconds = _outcome(root / f"{index}", ranks, settings, None)
        found, delayed = [], 0.0
        for number in range(share):
            seed = 1000 * index + number
            outcome, more = _outcome(root / f"{index}_{number}", ranks, settings, seed)
            delayed += more
            if (problem := difference(whole, outcome)) is not None:
                found.append(f"seed {seed}: {problem}")
        rows.append({
            "steps": kind, "lag": lag, "train + generate": f"{ranks - generating} + {generating}",
            "delayed runs": share,
            "times as long": delayed / share / seconds, "equal": share - len(found), "problem": "; ".join(found[:2]),
        })  # fmt: skip
    return BenchTable(
        title=f"bench ahead: {num_runs} runs delayed by up to {MOST_SECONDS} s at every kind of point on every rank",
        rows=rows,
        notes=("equal: weights, optimizer, rows and metrics of the run without delays, to the bit",),
        details={},
        passed=all(row["equal"] == row["delayed runs"] and row["times as long"] > 1 for row in rows),
    )


def _outcome(folder: Path, ranks: int, settings: tuple[str, ...], seed: int | None) -> tuple[dict[str, object], float]:
    """A run's outcome, and the seconds of its steps."""
    folder.mkdir()
    job = run_job(
        "train", inline_config(folder), f"run.dir={folder}/run", *settings, ranks=ranks, timeout=600, kind="cpu",
        prepare=None if seed is None else partial(delay_at_random, seed),
    )  # fmt: skip
    if job.returncode:
        raise RuntimeError(f"seed {seed}, {' '.join(settings)}: {job.stderr[-2000:]}")
    return outcome_of(folder / "run"), sum(step["time/step"] for step in metrics_of(folder / "run"))
