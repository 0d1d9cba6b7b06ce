"""Generated tokens per second of the native engine, transformers' `generate` and vLLM's CPU build, run in turn.

All have the same random weights, prompts in groups, rows at once and threads, and sample at temperature 1. Responses
are all a quarter of --limit long (fixed), have log-normal lengths with that mean (lognormal), or end with a stop token
that each draw hits with such a chance (ragged), after --limit tokens at the latest. Each engine keeps its process; in
each round each of them runs through all rows. The share of the matrix products is what the same products alone take.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spmdrl.engines.models.decoder import DecoderConfig
from tests.bench.harness.bench_models import ROLLOUT_MODELS, write_model
from tests.bench.harness.bench_table import BenchTable
from tests.bench.harness.in_turn import ContenderResults, in_turn
from tests.bench.harness.peers import Peer, copy_modules, running
from tests.bench.rollout.rollout_work import MODEL_FOLDER, EngineRun, RolloutWork, WorkSize, make_work

NATIVE, PEERS = "native", ("generate", "vllm")
ENGINES = (NATIVE, *PEERS)
# What runs in vLLM's own environment: plain files, without what else this package needs.
_COPIED_MODULES = (
    "tests.bench.harness.replies",
    "tests.bench.rollout.rollout_work",
    "tests.bench.rollout.rollout_vllm",
)
_VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    made = ",".join(ROLLOUT_MODELS)
    parser.add_argument("--models", type=_names, default=("5M", "30M"), help=f"random ones, of {made}; default: 5M,30M")
    parser.add_argument("--engines", type=_names, default=PEERS, help=f"of {','.join(ENGINES)}; all by default")
    parser.add_argument("--lengths", type=_names, help="of fixed,lognormal,ragged; all by default")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8, help="responses per prompt")
    parser.add_argument("--prompt-length", type=int, default=32, help="mean tokens of a prompt")
    parser.add_argument("--limit", type=int, default=256, help="most tokens of a response, 4 times the mean")
    parser.add_argument("--rows-at-once", type=int, default=64, help="rows that an engine decodes together")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each engine")
    parser.add_argument("--rounds", type=int, default=3, help="how often all run in turn")
    parser.add_argument("--limit-seconds", type=float, default=900.0, help="longest that one run may take")
    parser.add_argument("--vllm-python", default=sys.executable, help="Python that has vLLM's CPU build")


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


Runs = Mapping[tuple[str, str], ContenderResults[EngineRun]]
"""what was measured with one model, by distribution of lengths and engine"""


def run(arguments: argparse.Namespace) -> BenchTable:
    """Measure all in turn. Raises RuntimeError if the native engine fails; peers that fail have a remark."""
    with tempfile.TemporaryDirectory(prefix="spmdrl-bench-", ignore_cleanup_errors=True) as name:
        folders = {model: Path(name) / model for model in arguments.models}
        works = {model: _prepare(folder, ROLLOUT_MODELS[model], arguments) for model, folder in folders.items()}
        found = _measure(folders, works, arguments)
    for model, runs in found.items():
        check_same_work(runs, works[model])
    return summarize(found, arguments)


def _prepare(folder: Path, config: DecoderConfig, arguments: argparse.Namespace) -> RolloutWork:
    """Lay out what the engines read: the model, the work, and the modules for vLLM's Python."""
    folder.mkdir()
    write_model(folder / MODEL_FOLDER, config)
    size = WorkSize(
        num_prompts=arguments.prompts,
        group_size=arguments.group_size,
        prompt_length=arguments.prompt_length,
        limit=arguments.limit,
        vocab_size=config.vocab_size,
    )
    work = make_work(size, rows_at_once=arguments.rows_at_once, threads=arguments.threads)
    work.save(folder)
    copy_modules(_COPIED_MODULES, folder / "modules")
    return work


def _measure(
    folders: Mapping[str, Path], works: Mapping[str, RolloutWork], arguments: argparse.Namespace
) -> dict[str, Runs]:
    engines = [engine for engine in ENGINES if engine in (NATIVE, *arguments.engines)]
    with contextlib.ExitStack() as stack:
        starts = {
            (model, engine): functools.partial(_start, engine, folder, arguments, stack)
            for model, folder in folders.items()
            for engine in engines
        }
        started = in_turn(starts, rounds=1, optional=[start for start in starts if start[1] in PEERS])
        contenders = {
            (model, lengths, engine): functools.partial(_generate, started[model, engine], lengths)
            for model, work in works.items()
            for lengths in arguments.lengths or work.lengths
            for engine in engines
        }
        optional = [name for name in contenders if name[2] != NATIVE]
        found = in_turn(contenders, arguments.rounds, optional=optional)
    return {
        model: {(lengths, engine): runs for (own, lengths, engine), runs in found.items() if own == model}
        for model in works
    }


def _start(engine: str, folder: Path, arguments: argparse.Namespace, stack: contextlib.ExitStack) -> Peer:
    """An engine that is ready; it is ended with the stack."""
    environment = {
        "OMP_NUM_THREADS": str(arguments.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TMPDIR": str(folder),
    }
    if engine == "vllm":
        command = [arguments.vllm_python, "-m", "tests.bench.rollout.rollout_vllm", str(folder)]
        environment |= {**_VLLM_ENVIRONMENT, "PYTHONPATH": str(folder / "modules")}
    else:
        command = [sys.executable, "-m", "tests.bench.rollout.rollout_engines", engine, str(folder)]
    peer = stack.enter_context(running(command, environment, arguments.limit_seconds))
    peer.reply()
    return peer


def _generate(started: ContenderResults[Peer], lengths: str) -> EngineRun:
    if started.missing is not None:
        raise RuntimeError(started.missing)
    return EngineRun(**started.results[0].request(lengths))


def check_same_work(runs: Runs, work: RolloutWork) -> None:
    """Raise RuntimeError if an engine made too few or too many tokens, which would make its rate meaningless."""
    for (lengths, engine), turns in runs.items():
        wanted = work.lengths[lengths]
        for made in (found.row_lengths for found in turns.results):
            if len(made) != work.num_rows or any(
                not 1 <= length <= limit or (length < limit and not wanted.stop_ids)
                for length, limit in zip(made, wanted.limits, strict=False)
            ):
                raise RuntimeError(f"{engine} was given {lengths} lengths {wanted.limits}, but made {made}")


def summarize(found: Mapping[str, Runs], arguments: argparse.Namespace) -> BenchTable:
    """The table, and ratios of the native engine's rates to each other one's."""
    rows = [_row(model, lengths, engine, runs) for model, runs in found.items() for lengths, engine in runs]
    at_once = f"{arguments.rows_at_once} rows at once"
    return BenchTable(
        title=f"bench rollout: {arguments.prompts} prompts x {arguments.group_size} responses of at most "
        f"{arguments.limit} tokens, {at_once}, {arguments.threads} threads, medians of {arguments.rounds} rounds",
        rows=rows,
        notes=_NOTES,
        details={
            "ratios": _ratios(rows, "native / it"),
            "ratios_of_cpu_time": _ratios(rows, "by CPU time"),
            "seconds": {
                f"{model}_{engine}_{lengths}": [each.seconds for each in turns.results]
                for model, runs in found.items()
                for (lengths, engine), turns in runs.items()
                if turns.results
            },
        },
    )


_NOTES = (
    "native / it: ratios of the medians of tokens per second; by CPU time: the same per CPU second of the process, "
    "which other work on the machine changes less",
    "of matmul: CPU time that the same matrix products alone take, without all else, / the engine's; dense models only",
)


def _row(model: str, lengths: str, engine: str, runs: Runs) -> dict[str, Any]:
    found, native = runs[lengths, engine].results, runs[lengths, NATIVE].results
    wall, cpu = _median_rates(found)
    native_wall, native_cpu = _median_rates(native)
    shares = [each.extra["matmul_seconds"] / each.cpu_seconds for each in found if "matmul_seconds" in each.extra]
    return {
        "model": model,
        "lengths": lengths,
        "engine": engine,
        "tokens/s": wall,
        "tokens/CPU s": cpu,
        "native / it": wall and native_wall / wall,
        "by CPU time": cpu and native_cpu / cpu,
        "of matmul": statistics.median(shares) if shares else None,
        "mean length": statistics.fmean(found[0].row_lengths) if found else None,
        "remark": runs[lengths, engine].missing,
    }


def _median_rates(runs: Sequence[EngineRun]) -> tuple[Any, Any]:
    """Tokens a second, and a second of CPU time; None without runs."""
    if not runs:
        return None, None
    wall = statistics.median(run.num_tokens / run.seconds for run in runs)
    return wall, statistics.median(run.num_tokens / run.cpu_seconds for run in runs)


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
