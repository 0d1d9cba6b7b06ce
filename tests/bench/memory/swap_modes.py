"""Step time and memory of whole training runs by `reshard.swap`: auto, always and never, in turn.

The model is Qwen2.5-0.5B's shape with random weights, made here. Every response has exactly --length tokens. The first
step of a run isn't counted. Peaks are of resident memory since the process started; while generating, what the ledger
holds on the device.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from spmdrl.engines.models.hf.model_folder import parameter_shapes
from spmdrl.engines.models.making.make_model import make_char_tokenizer
from spmdrl.nouns.settings.flow_config import SwapMode
from spmdrl.observability.timeline.timeline import read_timeline
from tests.bench.harness.bench_models import QWEN_0_5B, write_model
from tests.bench.harness.bench_table import BenchTable
from tests.bench.harness.in_turn import in_turn
from tests.bench.harness.train_runs import check_steps, train_steps

MODES: tuple[SwapMode, ...] = ("auto", "always", "never")
_GIB = 1 << 30


@dataclass(frozen=True)
class TrainedRun:
    """What was measured in one run."""

    step_seconds: list[float]
    reshard_seconds: list[float]
    peak_gib: float
    generating_bytes: int
    """on the device at the end of generation, by the ledger of the fullest rank"""
    decision: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--layers", type=int, default=QWEN_0_5B.num_layers)
    parser.add_argument("--vocabulary", type=int, default=QWEN_0_5B.vocab_size)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rows", type=int, default=8, help="responses of a step, to half as many prompts")
    parser.add_argument("--length", type=int, default=24, help="tokens of every response")
    parser.add_argument("--steps", type=int, default=3, help="steps of each run, the first of which is not counted")
    parser.add_argument("--rounds", type=int, default=1, help="how often all run in turn")


def run(arguments: argparse.Namespace) -> BenchTable:
    """Train in each mode and dtype in turn. Raises RuntimeError with the end of a run's stderr if it fails."""
    check_steps(arguments.steps)
    config = replace(QWEN_0_5B, num_layers=arguments.layers, vocab_size=arguments.vocabulary)
    with tempfile.TemporaryDirectory(prefix="spmdrl-bench-") as name:
        folder = Path(name)
        write_model(folder / "model", config, eos_token_id=2)
        make_char_tokenizer(folder / "model")
        lines = [json.dumps({"prompt": f"{n}+{n + 7}=", "answer": str(2 * n + 7)}) for n in range(64)]
        (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
        runs = {
            (dtype, mode): functools.partial(_train, arguments, folder, dtype=dtype, mode=mode)
            for dtype in arguments.dtypes
            for mode in arguments.modes
        }
        found = {key: turn.results for key, turn in in_turn(runs, arguments.rounds).items()}
    num_parameters = sum(map(math.prod, parameter_shapes(config).values()))
    return BenchTable(
        title=f"bench swap: {num_parameters / 1e6:.0f}M parameters, {arguments.rows} responses of "
        f"{arguments.length} tokens, {arguments.ranks} ranks",
        rows=[_row(dtype, mode, found) for dtype, mode in found],
        notes=("seconds are medians of steps, of the slowest rank; GiB are of the fullest rank",),
        details={"decisions": {f"{dtype} {mode}": each[-1].decision for (dtype, mode), each in found.items()}},
    )


def _row(dtype: str, mode: str, found: Mapping[tuple[str, str], Sequence[TrainedRun]]) -> dict[str, object]:
    runs, stays = found[dtype, mode], found.get((dtype, "never"))
    seconds = _median_step(runs)
    return {
        "dtype": dtype,
        "reshard.swap": mode,
        "step s": seconds,
        "of it resharding": statistics.median(seconds for run in runs for seconds in run.reshard_seconds),
        "x never": seconds / _median_step(stays) if stays else "",
        "peak GiB": max(run.peak_gib for run in runs),
        "while generating GiB": runs[-1].generating_bytes / _GIB,
    }


def _median_step(runs: Sequence[TrainedRun]) -> float:
    return statistics.median(seconds for run in runs for seconds in run.step_seconds)


def _train(arguments: argparse.Namespace, inputs: Path, *, dtype: str, mode: str) -> TrainedRun:
    """One run of the `train` verb."""
    settings = {
        "model.path": inputs / "model",
        "model.dtype": dtype,
        "data.train": inputs / "prompts.jsonl",
        "rollout.prompts_per_step": arguments.rows // 2,
        "rollout.num_generations": 2,
        "rollout.max_completion_length": arguments.length,
        "rollout.ignore_eos": "true",
        "train.max_steps": arguments.steps,
        "resources.device": "cpu",
        "reshard.swap": mode,
    }
    folder = inputs / "run"
    steps = train_steps(folder, settings, num_ranks=arguments.ranks, environment={})
    held = [snapshot.held for snapshot in read_timeline(folder / "timeline").snapshots]
    run = TrainedRun(
        [step["time/step"] for step in steps],
        [step["time/resharding"] for step in steps],
        max(step["mem/peak_resident_gib"] for step in steps),
        max(look.device_bytes for look in held if look.stage == "generation"),
        json.dumps(json.loads((folder / "summary.json").read_text())["swap"]),
    )
    # Its checkpoint is four times as large as the model.
    shutil.rmtree(folder)
    return run
