"""One training step's stages, beside those of another trainer run in turn.

Fixed work: every response has exactly --length tokens, unless --natural-stops lets it end sooner. The other trainer is
any command that prints one JSON line a step with `ete`, `gen`, `update` (seconds) and `tok_s` (tokens per second and
device); give the same sizes to both.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shlex
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from spmdrl.bench.harness.bench_table import BenchTable
from spmdrl.bench.harness.in_turn import in_turn
from spmdrl.bench.harness.peers import run_to_end
from spmdrl.bench.harness.train_runs import STEPS_OF_WARM_UP, check_steps, train_steps

PEER_NAMES = {"step": "ete", "generation": "gen", "update": "update"}
RATE = "tokens_per_second_per_device"
_LONGEST_SECONDS = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="Hugging Face folder of the model")
    parser.add_argument("--prompts", required=True, help="JSONL file with prompt and answer")
    parser.add_argument("--prompts-per-step", type=int, default=32)
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="tokens of every response")
    parser.add_argument("--natural-stops", action="store_true", help="responses may end before --length")
    parser.add_argument("--steps", type=int, default=4, help="steps of each run, the first of which is not counted")
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this machine")
    parser.add_argument("--rounds", type=int, default=1, help="how often the two run in turn")
    parser.add_argument("--peer", help="command of the other trainer")


def run(arguments: argparse.Namespace) -> BenchTable:
    """Run both in turn, and compare medians over all counted steps. Raises ValueError if a run gives no steps."""
    check_steps(arguments.steps)
    trainers = {"ours": functools.partial(our_steps, arguments)}
    if arguments.peer:
        trainers["peer"] = functools.partial(peer_steps, shlex.split(arguments.peer))
    turns = in_turn(trainers, arguments.rounds)
    steps = {name: [step for each in turn.results for step in each] for name, turn in turns.items()}
    if not all(steps.values()):
        raise ValueError(f"--peer {arguments.peer} printed no step after {STEPS_OF_WARM_UP} of warm-up; let it do more")
    length = f"{'up to ' if arguments.natural_stops else ''}{arguments.length} tokens"
    sizes = f"{arguments.prompts_per_step} prompts x {arguments.num_generations} responses x {length}"
    return BenchTable(
        title=f"bench step: {sizes}, {arguments.ranks} ranks, medians over {len(steps['ours'])} steps",
        rows=[_row(name, **steps) for name in (*PEER_NAMES, RATE)],
        notes=("seconds, but for tokens per second and device (Eq. 5 with real lengths)",),
        details={"ours": steps["ours"], "peer": steps.get("peer", [])},
    )


def _row(name: str, ours: Sequence[Mapping[str, float]], peer: Sequence[Mapping[str, float]] = ()) -> dict[str, object]:
    own = statistics.median(step[name] for step in ours)
    row: dict[str, object] = {"quantity": name, "spmdrl": own}
    if peer:
        other = statistics.median(step[name] for step in peer)
        row |= {"peer": other, "peer / spmdrl": other / own}
    return row


def our_steps(arguments: argparse.Namespace) -> list[dict[str, float]]:
    """The counted steps of a run of the `train` verb on this machine."""
    settings = {
        "model.path": arguments.model,
        "data.train": arguments.prompts,
        "rollout.prompts_per_step": arguments.prompts_per_step,
        "rollout.num_generations": arguments.num_generations,
        "rollout.max_completion_length": arguments.length,
        "rollout.ignore_eos": str(not arguments.natural_stops).lower(),
        "rollout.max_running_rows": arguments.prompts_per_step * arguments.num_generations,
        "train.max_steps": arguments.steps,
        "resources.device": "auto",
    }
    with tempfile.TemporaryDirectory(prefix="spmdrl-bench-") as folder:
        steps = train_steps(Path(folder), settings, num_ranks=arguments.ranks, environment=_environment())
    return [{name: step[f"time/{name}"] for name in PEER_NAMES} | {RATE: step[f"perf/eq5_{RATE}"]} for step in steps]


def peer_steps(command: Sequence[str]) -> list[dict[str, float]]:
    """The counted steps that the other trainer printed, under our names. Raises RuntimeError if it fails."""
    steps = []
    for line in run_to_end(command, _environment(), _LONGEST_SECONDS).splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "ete" in record:
            named = {name: float(record[theirs]) for name, theirs in PEER_NAMES.items()}
            steps.append(named | {RATE: float(record["tok_s"])})
    return steps[STEPS_OF_WARM_UP:]


def _environment() -> dict[str, str]:
    """As many threads as each of two processes has cores for, unless the user chose."""
    threads = str(max(1, (os.cpu_count() or 1) // 2))
    return {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE", **os.environ}
