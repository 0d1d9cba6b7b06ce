"""Step time and memory of whole training runs by `reshard.swap`: auto, always and never, in turn.

The model is Qwen2.5-0.5B's shape with random weights, made here. Every response has exactly --length tokens. The first
step of a run isn't counted. Peaks are of resident memory since the process started; while generating, what the ledger
holds on the device.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from spmdrl.bench.harness.bench_table import BenchTable
from spmdrl.bench.harness.peers import run_to_end
from spmdrl.dataflow.resharding.moving.gather import SwapMode
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.model_folder import hf_config_dict, parameter_shapes
from spmdrl.engines.models.hf.model_weights import write_weights
from spmdrl.engines.models.making.make_model import RandomWeights, make_char_tokenizer
from spmdrl.observability.timeline.timeline import read_timeline

QWEN_0_5B = DecoderConfig(
    model_type="qwen2", vocab_size=151936, hidden_size=896, intermediate_size=4864, num_layers=24, num_heads=14,
    num_kv_heads=2, head_size=64, rms_eps=1e-6, rope_theta=1e6, qk_norm=False, attention_bias=True, tied_head=True,
    max_positions=32768,
)  # fmt: skip
MODES: tuple[SwapMode, ...] = ("auto", "always", "never")
STEPS_OF_WARM_UP = 1
_LONGEST_SECONDS = 3600.0
_GIB = 1 << 30


@dataclass
class Runs:
    """What the runs of one dtype and mode have shown."""

    step_seconds: list[float]
    reshard_seconds: list[float]
    peak_gib: float = 0.0
    generating_bytes: int = 0
    """on the device at the end of generation, by the ledger of the fullest rank"""
    decision: str = ""


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
    """Train in each mode and dtype in turn. Raises RuntimeError with a run's last words if it fails."""
    if arguments.steps <= STEPS_OF_WARM_UP:
        raise ValueError(f"--steps {arguments.steps} leaves no step after {STEPS_OF_WARM_UP} of warm-up; raise it")
    found: dict[tuple[str, str], Runs] = {}
    with tempfile.TemporaryDirectory(prefix="spmdrl-bench-") as name:
        folder = Path(name)
        config = replace(QWEN_0_5B, num_layers=arguments.layers, vocab_size=arguments.vocabulary)
        _make_inputs(folder, config)
        for number in range(arguments.rounds):
            for dtype in arguments.dtypes:
                for mode in arguments.modes:
                    runs = found.setdefault((dtype, mode), Runs([], []))
                    _train(arguments, folder, folder / f"{dtype}_{mode}_{number}", runs, dtype=dtype, mode=mode)
    rows = [_row(dtype, mode, found) for dtype, mode in found]
    num_parameters = sum(map(math.prod, parameter_shapes(config).values()))
    return BenchTable(
        title=f"bench swap: {num_parameters / 1e6:.0f}M parameters, {arguments.rows} responses of "
        f"{arguments.length} tokens, {arguments.ranks} ranks",
        columns=tuple(rows[0]),
        rows=rows,
        notes=("seconds are medians of steps, of the slowest rank; GiB are of the fullest rank",),
        details={"decisions": {f"{dtype} {mode}": runs.decision for (dtype, mode), runs in found.items()}},
    )


def _row(dtype: str, mode: str, found: Mapping[tuple[str, str], Runs]) -> dict[str, object]:
    runs, stays = found[dtype, mode], found.get((dtype, "never"))
    seconds = statistics.median(runs.step_seconds)
    return {
        "dtype": dtype,
        "reshard.swap": mode,
        "step s": seconds,
        "of it resharding": statistics.median(runs.reshard_seconds),
        "x never": seconds / statistics.median(stays.step_seconds) if stays else "",
        "peak GiB": runs.peak_gib,
        "while generating GiB": runs.generating_bytes / _GIB,
    }


def _make_inputs(folder: Path, config: DecoderConfig) -> None:
    """Write the model folder and the prompts."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({**hf_config_dict(config, torch.float32), "eos_token_id": 2}))
    make_char_tokenizer(model)
    weights = RandomWeights(config, 0)
    write_weights(model, ((name, weights(name)) for name in weights.names))
    lines = [json.dumps({"prompt": f"{number}+{number + 7}=", "answer": str(2 * number + 7)}) for number in range(64)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def _train(
    arguments: argparse.Namespace, inputs: Path, folder: Path, runs: Runs, *, dtype: str, mode: str
) -> None:  # fmt: skip
    """One run of the `train` verb, whose figures are added to `runs`."""
    settings = {
        "model.path": inputs / "model", "model.dtype": dtype, "data.train": inputs / "prompts.jsonl",
        "rollout.prompts_per_step": arguments.rows // 2, "rollout.num_generations": 2, "rollout.ignore_eos": "true",
        "rollout.max_completion_length": arguments.length, "reward.functions": "[exact]",
        "train.max_steps": arguments.steps, "train.skip_zero_advantage": "false", "checkpoint.interval": 0,
        "log.backends": "[jsonl]", "resources.device": "cpu", "reshard.swap": mode, "run.dir": folder,
    }  # fmt: skip
    launcher = [sys.executable]
    if arguments.ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
    words = [f"{key}={value}" for key, value in settings.items()]
    run_to_end([*launcher, "-m", "spmdrl", "train", *words], {}, _LONGEST_SECONDS)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][STEPS_OF_WARM_UP:]
    runs.step_seconds += [step["time/step"] for step in steps]
    runs.reshard_seconds += [step["time/resharding"] for step in steps]
    runs.peak_gib = max([runs.peak_gib, *(step["mem/peak_resident_gib"] for step in steps)])
    held = [snapshot.held for snapshot in read_timeline(folder / "timeline").snapshots]
    runs.generating_bytes = max(look.device_bytes for look in held if look.stage == "generation")
    runs.decision = json.dumps(json.loads((folder / "summary.json").read_text())["swap"])
    # Its checkpoint is four times as large as the model.
    shutil.rmtree(folder)
