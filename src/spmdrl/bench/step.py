"""One training step's stages, beside those of another trainer run in turn.

Fixed work: every response has exactly --length tokens, unless --natural-stops lets it end sooner. The other trainer is
any command that prints one JSON line a step with `ete`, `gen`, `update` (seconds) and `tok_s` (tokens per second and
device); give the same sizes to both.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from spmdrl.bench.harness.bench_table import BenchTable

# The first step of a process builds caches and optimizer state; the figures are those of the later ones.
STEPS_OF_WARM_UP = 1
PEER_NAMES = {"step": "ete", "generation": "gen", "update": "update"}
LONGEST_RUN_SECONDS = 3600.0


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
    ours: list[dict[str, float]] = []
    peer: list[dict[str, float]] = []
    for _ in range(arguments.rounds):
        ours += our_steps(arguments)[STEPS_OF_WARM_UP:]
        if arguments.peer:
            peer += peer_steps(shlex.split(arguments.peer))[STEPS_OF_WARM_UP:]
    if not ours or (arguments.peer and not peer):
        raise ValueError(f"--steps {arguments.steps} leaves no step after {STEPS_OF_WARM_UP} of warm-up; raise it")
    rows = [_row(name, ours, peer) for name in ("step", "generation", "update")]
    rows.append(_row("tokens_per_second_per_device", ours, peer))
    columns = ("quantity", "spmdrl", "peer", "peer / spmdrl") if peer else ("quantity", "spmdrl")
    length = f"{'up to ' if arguments.natural_stops else ''}{arguments.length} tokens"
    sizes = f"{arguments.prompts_per_step} prompts x {arguments.num_generations} responses x {length}"
    return BenchTable(
        title=f"bench step: {sizes}, {arguments.ranks} ranks, medians over {len(ours)} steps",
        columns=columns,
        rows=rows,
        notes=("seconds, but for tokens per second and device (Eq. 5 with real lengths)",),
        details={"ours": ours, "peer": peer},
    )


def _row(name: str, ours: Sequence[Mapping[str, float]], peer: Sequence[Mapping[str, float]]) -> dict[str, object]:
    own = statistics.median(step[name] for step in ours)
    row: dict[str, object] = {"quantity": name, "spmdrl": own}
    if peer:
        other = statistics.median(step[name] for step in peer)
        row |= {"peer": other, "peer / spmdrl": other / own}
    return row


def our_steps(arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Stages of each step of a run of the `train` verb on this machine."""
    with tempfile.TemporaryDirectory(prefix="spmdrl-bench-") as folder:
        overrides = {
            "model.path": arguments.model,
            "data.train": arguments.prompts,
            "rollout.prompts_per_step": arguments.prompts_per_step,
            "rollout.num_generations": arguments.num_generations,
            "rollout.max_completion_length": arguments.length,
            "rollout.ignore_eos": str(not arguments.natural_stops).lower(),
            "rollout.max_running_rows": arguments.prompts_per_step * arguments.num_generations,
            "reward.functions": "[exact]",
            "train.max_steps": arguments.steps,
            "train.skip_zero_advantage": "false",
            "run.dir": folder,
            "resources.device": "auto",
            "checkpoint.interval": 0,
            "log.backends": "[jsonl]",
        }
        ranks = f"--nproc-per-node={arguments.ranks}"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks]
        command = [*launcher, "-m", "spmdrl", "train", *(f"{key}={value}" for key, value in overrides.items())]
        _checked(command)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
        return [_named_as_ours(json.loads(line)) for line in lines]


def _named_as_ours(metrics: Mapping[str, float]) -> dict[str, float]:
    steps = {name: metrics[f"time/{name}"] for name in PEER_NAMES}
    return steps | {"tokens_per_second_per_device": metrics["perf/eq5_tokens_per_second_per_device"]}


def peer_steps(command: Sequence[str]) -> list[dict[str, float]]:
    """The steps that the other trainer printed, under our names."""
    steps = []
    for line in _checked(command).splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "ete" in record:
            named = {name: float(record[theirs]) for name, theirs in PEER_NAMES.items()}
            steps.append(named | {"tokens_per_second_per_device": float(record["tok_s"])})
    return steps


def _checked(command: Sequence[str]) -> str:
    """Run a command to its end and return what it printed. Raises ValueError with its last words if it failed."""
    threads = str(max(1, (os.cpu_count() or 1) // 2))
    environment = {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    done = subprocess.run(  # noqa: S603 - the command is the user's own
        command, capture_output=True, text=True, env=environment, timeout=LONGEST_RUN_SECONDS, check=False
    )
    if done.returncode:
        raise ValueError(f"{shlex.join(command)} ended with code {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout
