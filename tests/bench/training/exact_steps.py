"""What `debug.batch_invariant` costs: training steps with and without it, run in turn.

With one update per step nothing needs old log-probs. With two, the fast step has a pass for them, and the exact step
uses those of the rollout. Fixed work: every response of the larger model has the same number of tokens.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.bench.harness.bench_table import BenchTable
from tests.bench.harness.in_turn import in_turn
from tests.bench.harness.train_runs import check_steps, train_steps

_ROLLOUT = {"rollout.prompts_per_step": 64, "rollout.num_generations": 8, "rollout.max_completion_length": 6}
MODELS: dict[str, dict[str, object]] = {
    "quickstart": {
        "model.make": "{hidden_size: 128, num_layers: 5, num_heads: 4, num_kv_heads: 2, intermediate_size: 384, "
        "max_positions: 64}",
        "data.train": "synthetic://addition?low=0&high=49&test_fraction=0.15&count=2000",
        "rollout.max_running_rows": 512,
        **_ROLLOUT,
    },
    "5m": {
        "model.make": "{hidden_size: 256, num_layers: 6, num_heads: 8, num_kv_heads: 4, intermediate_size: 768, "
        "max_positions: 128}",
        "data.train": "synthetic://addition?low=0&high=999&count=2000",
        "rollout.max_running_rows": 256,
        **_ROLLOUT,
        "rollout.prompts_per_step": 32,
        "rollout.max_completion_length": 64,
        "rollout.ignore_eos": "true",
    },
}
STAGES = ("step", "generation", "old_logprobs", "update")
_MISMATCH = "mismatch/abs_max"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=sorted(MODELS), default="5m", help="the quickstart's, or 4.7M parameters")
    parser.add_argument("--steps", type=int, default=5, help="steps of each run, the first of which is not counted")
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this machine")
    parser.add_argument("--rounds", type=int, default=3, help="how often all run in turn")


def run(arguments: argparse.Namespace) -> BenchTable:
    """Medians over all counted steps; passed if every mismatch of the exact runs is 0."""
    check_steps(arguments.steps)
    runs = {
        (mode, updates): functools.partial(_steps, arguments, is_exact=mode == "exact", num_updates=updates)
        for updates in (1, 2)
        for mode in ("fast", "exact")
    }
    turns = in_turn(runs, arguments.rounds)
    steps = {key: [step for each in turn.results for step in each] for key, turn in turns.items()}
    medians = {
        key: {stage: statistics.median(step.get(f"time/{stage}", 0.0) for step in of_run) for stage in STAGES}
        for key, of_run in steps.items()
    }
    largest = max(step[_MISMATCH] for (mode, _), of_run in steps.items() if mode == "exact" for step in of_run)
    rows = [
        {"updates per step": updates, "seconds": mode, **medians[mode, updates]}
        for updates in (1, 2)
        for mode in ("fast", "exact")
    ]
    ratios = {
        name: medians["exact", updates][stage] / medians["fast", updates][stage]
        for name, (updates, stage) in {
            "step": (1, "step"),
            "generation": (1, "generation"),
            "update": (1, "update"),
            "step_with_old_logprobs": (2, "step"),
        }.items()
    }
    return BenchTable(
        title=f"bench exact: {arguments.model}, {arguments.ranks} ranks, medians over {len(steps['fast', 1])} steps",
        rows=rows,
        notes=(
            "exact / fast: " + ", ".join(f"{name} {ratio:.3g}" for name, ratio in ratios.items()),
            f"the largest {_MISMATCH} of the exact runs is {largest:g}",
        ),
        details={"ratios": ratios, _MISMATCH: largest},
        passed=largest == 0,
    )


def _steps(arguments: argparse.Namespace, *, is_exact: bool, num_updates: int) -> list[dict[str, float]]:
    settings: Mapping[str, object] = MODELS[arguments.model] | {
        "train.max_steps": arguments.steps,
        "train.updates_per_step": num_updates,
        "debug.batch_invariant": str(is_exact).lower(),
        "eval.before_train": "false",
        "optim.lr": 1e-4,
    }
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="spmdrl-bench-") as folder:
        return train_steps(Path(folder), settings, num_ranks=arguments.ranks, environment=environment)
