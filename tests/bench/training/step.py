"""One training step's stages, beside those of another trainer run in turn.

Fixed work: every response has exactly --length tokens, unless --natural-stops lets it end sooner. The other trainer is
any command that prints one JSON line a step with `ete`, `gen`, `update` (seconds) and `tok_s` (tokens per second and
device); give the same sizes to both. With --table there is no other trainer: one run under PyTorch's profiler, and the
seconds of its mean step by stage and kind of work (`step_seconds`).
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

from spmdrl.verbs.doctor.commands import run_to_end
from tests.bench.harness.bench_table import BenchTable
from tests.bench.harness.in_turn import in_turn
from tests.bench.harness.train_runs import (
    SETTINGS_OF_STEPS,
    STEPS_OF_WARM_UP,
    check_steps,
    run_module,
    train_steps,
    words_of,
)

PEER_NAMES = {"step": "ete", "generation": "gen", "update": "update"}
RATE = "tokens_per_second_per_device"
_RATIO = "peer / spmdrl"
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
    parser.add_argument(
        "--settings", nargs="+", type=_setting, default=[], metavar="KEY=VALUE", help="more settings of our run"
    )
    parser.add_argument("--table", action="store_true", help="profile our own steps instead: where their seconds go")


def run(arguments: argparse.Namespace) -> BenchTable:
    """Run both in turn, and compare medians over all counted steps. Raises ValueError if a run gives no steps."""
    check_steps(arguments.steps)
    if arguments.table:
        return table_of_seconds(arguments)
    trainers = {"ours": functools.partial(our_steps, arguments)}
    if arguments.peer:
        trainers["peer"] = functools.partial(peer_steps, shlex.split(arguments.peer))
    turns = in_turn(trainers, arguments.rounds)
    steps = {name: [step for each in turn.results for step in each] for name, turn in turns.items()}
    if not all(steps.values()):
        raise ValueError(f"--peer {arguments.peer} printed no step after {STEPS_OF_WARM_UP} of warm-up; let it do more")
    rows = {name: _row(name, **steps) for name in (*PEER_NAMES, RATE)}
    return BenchTable(
        title=f"bench step: {_sizes(arguments)}, medians over {len(steps['ours'])} steps",
        rows=list(rows.values()),
        notes=("seconds, but for tokens per second and device (Eq. 5 with real lengths)",),
        details={
            "ratios": {name: rows[name][_RATIO] for name in PEER_NAMES if _RATIO in rows[name]},
            "ours": steps["ours"],
            "peer": steps.get("peer", []),
        },
    )


def _row(name: str, ours: Sequence[Mapping[str, float]], peer: Sequence[Mapping[str, float]] = ()) -> dict[str, object]:
    own = statistics.median(step[name] for step in ours)
    row: dict[str, object] = {"quantity": name, "spmdrl": own}
    if peer:
        other = statistics.median(step[name] for step in peer)
        row |= {"peer": other, _RATIO: other / own}
    return row


def _sizes(arguments: argparse.Namespace) -> str:
    length = f"{'up to ' if arguments.natural_stops else ''}{arguments.length} tokens"
    rows = f"{arguments.prompts_per_step} prompts x {arguments.num_generations} responses"
    return f"{rows} x {length}, {arguments.ranks} ranks"


def table_of_seconds(arguments: argparse.Namespace) -> BenchTable:
    """Where the seconds of our mean step go on the main rank, in milliseconds, the costliest stage first."""
    with tempfile.TemporaryDirectory(prefix="spmdrl-bench-") as folder:
        out = Path(folder) / "seconds.json"
        # The last step, which writes a checkpoint, isn't profiled.
        settings = {**SETTINGS_OF_STEPS, **_settings(arguments), "train.max_steps": arguments.steps + 1}
        _, *words = words_of("train", settings, Path(folder) / "run")
        run_module(
            "tests.bench.training.step_seconds", [str(out), *words],
            num_ranks=arguments.ranks, environment=_environment(),
        )  # fmt: skip
        found = json.loads(out.read_text())
    seconds = sorted(found["seconds"].items(), key=lambda stage: -stage[1]["all"])
    rows = [{"stage": stage} | {kind: 1e3 * by_kind[kind] for kind in by_kind} for stage, by_kind in seconds]
    sums = {kind: sum(row[kind] for row in rows) for kind in rows[0] if kind != "stage"}
    share = (sums["products"] + sums["attention"]) / sums["all"]
    calls = ", ".join(f"{count:.3g} {name}" for name, count in found["collectives"].items())
    return BenchTable(
        title=f"bench step: {_sizes(arguments)}, mean of {arguments.steps - STEPS_OF_WARM_UP} steps under the profiler",
        rows=[*rows, {"stage": "all", **sums}],
        notes=(f"milliseconds; share of products, attention's among them: {share:.2f}", f"a step's messages: {calls}"),
        details={"share_of_products": share, "messages": found["collectives"]},
    )


def our_steps(arguments: argparse.Namespace) -> list[dict[str, float]]:
    """The counted steps of a run of the `train` verb on this machine."""
    with tempfile.TemporaryDirectory(prefix="spmdrl-bench-") as folder:
        steps = train_steps(
            Path(folder), _settings(arguments), num_ranks=arguments.ranks, environment=_environment()
        )  # fmt: skip
    return [{name: step[f"time/{name}"] for name in PEER_NAMES} | {RATE: step[f"perf/eq5_{RATE}"]} for step in steps]


def _setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r} has no key=value; write for example model.dtype=bfloat16")
    return key, value


def _settings(arguments: argparse.Namespace) -> dict[str, object]:
    return {
        "model.path": arguments.model,
        "data.train": arguments.prompts,
        "rollout.prompts_per_step": arguments.prompts_per_step,
        "rollout.num_generations": arguments.num_generations,
        "rollout.max_completion_length": arguments.length,
        "rollout.ignore_eos": str(not arguments.natural_stops).lower(),
        "rollout.max_running_rows": arguments.prompts_per_step * arguments.num_generations,
        "train.max_steps": arguments.steps,
        "resources.device": "auto",
        **dict(arguments.settings),
    }


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
