"""What guards a run costs a step: watchdog, fencing, fault points, account, row records and the look for slow ranks.

Three jobs of --steps steps in turn, --rounds times: as users run it, with every guard left out, and with each guard
timed. A pair's ratio is the median step with guards over that without; the sum of the timed pieces, taken from the rank
with the larger one, must be at most 1% of a step of 0.5 s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from tests.bench.harness.bench_table import BenchTable
from tests.bench.harness.in_turn import in_turn
from tests.bench.harness.train_runs import (
    SETTINGS_OF_STEPS,
    STEPS_OF_WARM_UP,
    check_steps,
    run_module,
    run_verb,
    words_of,
)
from tests.bench.training.safeguards import MAIN_THREAD, THREADS

_STEP_SECONDS = 0.5
_MOST_SHARE = 0.01
_MODULE = "tests.bench.training.safeguards"
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
# Steps of about half a second on two cores.
_SETTINGS: dict[str, object] = {
    "model.make": "{hidden_size: 128, num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2, "
    "intermediate_size: 384, max_position_embeddings: 128, chars: '0123456789+= '}",
    "data.train": "synthetic://addition?low=0&high=9&count=80", "rollout.ignore_eos": "true",
    "rollout.prompts_per_step": 8, "rollout.num_generations": 8, "rollout.max_completion_length": 48,
    "resources.device": "cpu",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=16, help="steps of each job, the first of which is not counted")
    parser.add_argument("--ranks", type=int, default=2, help="two or more, on this machine")
    parser.add_argument("--rounds", type=int, default=5)


def run(arguments: argparse.Namespace) -> BenchTable:
    """Passes where what was timed is at most 1% of a step of half a second."""
    check_steps(arguments.steps)
    jobs = {mode: partial(_job, mode, arguments.steps, arguments.ranks) for mode in ("with", "without", "timed")}
    turns = in_turn(jobs, arguments.rounds)
    steps = {mode: [one["step"] for one in turns[mode].results] for mode in jobs}
    pairs = sorted(one / other for one, other in zip(steps["with"], steps["without"], strict=True))
    rows = piece_rows([one["pieces"] for one in turns["timed"].results], arguments.steps)
    share = sum(float(str(row["share of 0.5 s"])) for row in rows)
    total = {
        "piece": "all",
        "calls per step": None,
        "ms per step": 1e3 * share * _STEP_SECONDS,
        "share of 0.5 s": share,
    }
    ratio, step = statistics.median(pairs), statistics.median(steps["with"])
    return BenchTable(
        title=f"bench overhead: what guards a run, on {arguments.ranks} ranks, median of {arguments.rounds} jobs",
        rows=[*rows, total],
        notes=(
            f"steps with guards over those without, in pairs: median {ratio:.4f}, from {pairs[0]:.4f} to "
            f"{pairs[-1]:.4f}; a step takes {step:.3f} s, medians of {arguments.steps - STEPS_OF_WARM_UP}",
        ),
        details={"pairs": pairs, "step_seconds": steps, "share": share},
        passed=share <= _MOST_SHARE,
    )


def _job(mode: str, num_steps: int, num_ranks: int) -> dict[str, object]:
    """The median step of one job, and what was timed in it by rank."""
    with tempfile.TemporaryDirectory(prefix="spmdrl-overhead-") as name:
        folder = Path(name)
        settings = {**SETTINGS_OF_STEPS, **_SETTINGS, "train.max_steps": num_steps}
        words = words_of("train", settings, folder / "run")
        if mode == "with":
            run_verb(words, num_ranks=num_ranks, environment=_ENVIRONMENT)
        else:
            run_module(_MODULE, [mode, str(folder), *words], num_ranks=num_ranks, environment=_ENVIRONMENT)
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()[STEPS_OF_WARM_UP:]
        pieces = [json.loads(path.read_text()) for path in folder.glob("pieces_*.json")]
    return {"step": statistics.median(json.loads(line)["time/step"] for line in lines), "pieces": pieces}


def piece_rows(jobs: Sequence[Sequence[Mapping[str, Mapping[str, float]]]], num_steps: int) -> list[dict[str, object]]:
    """By piece, its milliseconds per step on the rank where they are most, the median over jobs."""
    rows: list[dict[str, object]] = []
    for piece in (*MAIN_THREAD, *THREADS):
        by_job = [
            max(
                one["seconds"].get(piece, 0.0) / num_steps + one["shares"].get(piece, 0.0) * _STEP_SECONDS
                for one in job
            )
            for job in jobs
        ]
        seconds = statistics.median(by_job)
        calls = statistics.median(max(one["calls"].get(piece, 0) for one in job) for job in jobs) / num_steps
        rows.append({
            "piece": piece, "calls per step": calls or None, "ms per step": 1e3 * seconds,
            "share of 0.5 s": seconds / _STEP_SECONDS,
        })  # fmt: skip
    return rows
