"""Generated tokens per second of the native engine, transformers' two and vLLM's CPU build, run in turn.

All have the same random weights, prompts in groups, rows at once and threads, and sample at temperature 1. Responses
are all a quarter of --limit long (fixed), have log-normal lengths with that mean (lognormal), or end with a stop token
that each draw hits with such a chance (ragged), after --limit tokens at the latest. Each engine keeps its process; in
each round each of them runs through all rows. The share of the matrix products is what the same products alone take.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from spmdrl.bench.harness.bench_table import BenchTable
from spmdrl.bench.harness.lone_modules import copy_modules
from spmdrl.bench.harness.peers import Answering, answering
from spmdrl.bench.rollout.rollout_work import MODEL_FOLDER, Measured, Work, WorkSize, make_work
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.model_folder import hf_config_dict, read_config
from spmdrl.engines.models.hf.model_weights import write_weights
from spmdrl.engines.models.making.make_model import RandomWeights

NATIVE, PEERS = "native", ("generate", "continuous_batching", "vllm")
ENGINES = (NATIVE, *PEERS)
# What runs in vLLM's own environment: plain files, without what else this package needs.
_COPIED_MODULES = ("rollout_work", "rollout_vllm")
_VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


def _small_qwen3(*, hidden_size: int, intermediate_size: int, num_layers: int) -> DecoderConfig:
    return DecoderConfig(
        model_type="qwen3",
        vocab_size=512,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=8,
        num_kv_heads=4,
        head_size=hidden_size // 8,
        rms_eps=1e-6,
        rope_theta=10000.0,
        qk_norm=True,
        attention_bias=False,
        tied_head=True,
        max_positions=4096,
    )


MADE_MODELS = {
    "1M": _small_qwen3(hidden_size=128, intermediate_size=384, num_layers=4),
    "5M": _small_qwen3(hidden_size=256, intermediate_size=768, num_layers=6),
    "30M": _small_qwen3(hidden_size=512, intermediate_size=1920, num_layers=8),
}
"""What --models may name: parameters, in float32."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    made = ",".join(MADE_MODELS)
    parser.add_argument("--models", type=_names, default=("5M", "30M"), help=f"random ones, of {made}; default: 5M,30M")
    parser.add_argument("--engines", type=_names, default=ENGINES, help=f"of {','.join(ENGINES)}; all by default")
    parser.add_argument("--lengths", type=_names, help="of fixed,lognormal,ragged; all by default")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8, help="responses a prompt")
    parser.add_argument("--prompt-length", type=int, default=32, help="mean tokens of a prompt")
    parser.add_argument("--limit", type=int, default=256, help="most tokens of a response, 4 times the mean")
    parser.add_argument("--rows-at-once", type=int, default=64, help="rows that an engine decodes together")
    parser.add_argument("--compile", action="store_true", help="compile the native engine's decoding steps")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each engine")
    parser.add_argument("--rounds", type=int, default=3, help="how often all run in turn")
    parser.add_argument("--limit-seconds", type=float, default=900.0, help="longest that one run may take")
    parser.add_argument("--vllm-python", default=sys.executable, help="Python that has vLLM's CPU build")


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


@dataclass
class Runs:
    """What was measured of one engine with one model, by distribution."""

    by_lengths: dict[str, list[Measured]] = field(default_factory=dict)
    missing: str | None = None
    """why nothing was"""


def run(arguments: argparse.Namespace) -> BenchTable:
    """Measure all in turn. Raises RuntimeError if the native engine fails; a peer that fails has a row that says so."""
    found: dict[str, dict[str, Runs]] = {}
    for model in arguments.models:
        with tempfile.TemporaryDirectory(prefix="spmdrl-bench-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            work = _prepare(folder, model, arguments)
            found[model] = _measure(folder, work, arguments)
            check_same_work(found[model], work)
    return summarize(found, arguments)


def _prepare(folder: Path, model: str, arguments: argparse.Namespace) -> Work:
    """Lay out what the engines read: the model, the work, and the modules for vLLM's Python."""
    config = MADE_MODELS[model]
    weights = RandomWeights(config, seed=0)
    target = folder / MODEL_FOLDER
    target.mkdir()
    (target / "config.json").write_text(json.dumps(hf_config_dict(config, torch.float32)))
    write_weights(target, ((weight, weights(weight)) for weight in weights.names))
    size = WorkSize(
        num_prompts=arguments.prompts,
        group_size=arguments.group_size,
        prompt_length=arguments.prompt_length,
        limit=arguments.limit,
        vocab_size=read_config(target).vocab_size,
    )
    work = make_work(size, rows_at_once=arguments.rows_at_once, threads=arguments.threads, compiles=arguments.compile)
    work.save(folder)
    copy_modules("spmdrl.bench.rollout", _COPIED_MODULES, folder / "modules")
    return work


def _measure(folder: Path, work: Work, arguments: argparse.Namespace) -> dict[str, Runs]:
    runs = {engine: Runs() for engine in ENGINES if engine in (NATIVE, *arguments.engines)}
    with contextlib.ExitStack() as stack:
        started = {}
        for engine in runs:
            with _noting_failure(engine, runs):
                started[engine] = stack.enter_context(_start(engine, folder, arguments))
                started[engine].answer()
        for _ in range(arguments.rounds):
            for lengths in arguments.lengths or work.lengths:
                for engine in [engine for engine in started if runs[engine].missing is None]:
                    with _noting_failure(engine, runs):
                        fields = json.loads(started[engine].ask(lengths))
                        runs[engine].by_lengths.setdefault(lengths, []).append(Measured(**fields))
    return runs


def _start(engine: str, folder: Path, arguments: argparse.Namespace) -> contextlib.AbstractContextManager[Answering]:
    environment = {
        "OMP_NUM_THREADS": str(arguments.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TMPDIR": str(folder),
    }
    if engine == "vllm":
        command = [arguments.vllm_python, "-m", "spmdrl.bench.rollout.rollout_vllm", str(folder)]
        environment |= {**_VLLM_ENVIRONMENT, "PYTHONPATH": str(folder / "modules")}
    else:
        command = [sys.executable, "-m", "spmdrl.bench.rollout.rollout_engines", engine, str(folder)]
    return answering(command, environment, arguments.limit_seconds)


@contextlib.contextmanager
def _noting_failure(engine: str, runs: Mapping[str, Runs]) -> Any:
    try:
        yield
    except (RuntimeError, OSError) as error:
        if engine == NATIVE:
            raise
        runs[engine].missing = str(error).strip().splitlines()[-1]


def check_same_work(runs: Mapping[str, Runs], work: Work) -> None:
    """Raise RuntimeError where an engine made too few or too many tokens: then its rate means nothing."""
    for engine, measured in runs.items():
        for lengths, of_rounds in measured.by_lengths.items():
            asked = work.lengths[lengths]
            for found in of_rounds:
                made = found.row_lengths
                if len(made) != work.num_rows or any(
                    not 1 <= length <= limit or (length < limit and not asked.stop_ids)
                    for length, limit in zip(made, asked.limits, strict=False)
                ):
                    raise RuntimeError(f"{engine} was asked for {lengths} lengths {asked.limits}, but made {made}")


def summarize(found: Mapping[str, Mapping[str, Runs]], arguments: argparse.Namespace) -> BenchTable:
    """The table, and ratios of the native engine's rates to each other one's."""
    rows = [
        row
        for model, runs in found.items()
        for lengths in runs[NATIVE].by_lengths
        for row in _rows(model, lengths, runs)
    ]
    at_once = f"{arguments.rows_at_once} rows at once" + (", native compiled" if arguments.compile else "")
    return BenchTable(
        title=f"bench rollout: {arguments.prompts} prompts x {arguments.group_size} responses of at most "
        f"{arguments.limit} tokens, {at_once}, {arguments.threads} threads, medians of {arguments.rounds} rounds",
        columns=tuple(rows[0]),
        rows=rows,
        notes=_NOTES,
        details={
            "ratios": _ratios(rows, "native / it"),
            "ratios_of_cpu_time": _ratios(rows, "by CPU time"),
            "seconds": {
                f"{model}_{engine}_{lengths}": [measured.seconds for measured in of_rounds]
                for model, runs in found.items()
                for engine, run in runs.items()
                for lengths, of_rounds in run.by_lengths.items()
            },
        },
    )


_NOTES = (
    "native / it: ratios of the medians of tokens per second; by CPU time: the same per CPU second of the process, "
    "which other work on the machine changes less",
    "of matmul: CPU time that the same matrix products alone take, without all else, / the engine's",
)


def _rows(model: str, lengths: str, runs: Mapping[str, Runs]) -> list[dict[str, Any]]:
    rates = {engine: _median_rates(run.by_lengths.get(lengths, [])) for engine, run in runs.items()}
    wall, cpu = rates[NATIVE]
    assert wall is not None and cpu is not None, f"the native engine wasn't measured with {lengths} lengths"
    rows = []
    for engine, run in runs.items():
        measured = run.by_lengths.get(lengths, [])
        own_wall, own_cpu = rates[engine]
        share = [each.extra["matmul_seconds"] / each.cpu_seconds for each in measured if "matmul_seconds" in each.extra]
        rows.append(
            {
                "model": model,
                "lengths": lengths,
                "engine": engine,
                "tokens/s": own_wall,
                "tokens/CPU s": own_cpu,
                "native / it": own_wall and wall / own_wall,
                "by CPU time": own_cpu and cpu / own_cpu,
                "of matmul": statistics.median(share) if share else None,
                "mean length": statistics.fmean(measured[0].row_lengths) if measured else None,
                "remark": run.missing or "",
            }
        )
    return rows


def _median_rates(measured: Sequence[Measured]) -> tuple[float | None, float | None]:
    """Tokens a second, and a second of CPU time."""
    if not measured:
        return None, None
    wall = statistics.median(found.num_tokens / found.seconds for found in measured)
    return wall, statistics.median(found.num_tokens / found.cpu_seconds for found in measured)


def _ratios(rows: Sequence[Mapping[str, Any]], column: str) -> dict[str, float]:
    """By peer and distribution, and by peer alone: the least over the models, and over the distributions."""
    ratios: dict[str, float] = {}
    for row in rows:
        if row["engine"] == NATIVE or row[column] is None:
            continue
        names = (f"native_vs_{row['engine']}", f"native_vs_{row['engine']}_{row['lengths']}")
        for name in (*names, f"{names[1]}_{row['model']}"):
            ratios[name] = min(row[column], ratios.get(name, row[column]))
    return ratios
