"""Planned seconds of worker states beside measured ones, after a calibration of this machine.

The machine is calibrated for each family of models and dtype, with one rank and with two at once, by jobs of other
sizes than the cases; each case is planned with the rates of its family and of as many ranks as it has.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.bench.harness.bench_table import BenchTable
from tests.bench.plan.plan_cases import CASES, LENGTHS, PlanCase
from tests.support.jobs import run_job

GOAL = 0.25
_MOST_RANKS = 2
_STEPS, _WARM_UP_STEPS = 7, 2
# A rank that recomputes or swaps has the same work in other states.
_TIMED = ("generation", "reference", "old_logprobs", "values", "critic_update", "update")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", metavar="CASE", help="cases of bench plan on one or two ranks")
    parser.add_argument("--dtype", help="compute in this dtype, whatever a case says, such as float32")
    parser.add_argument("--devices", type=Path, metavar="FOLDER", help="keep the device files there, or use those")


def run(arguments: argparse.Namespace) -> BenchTable:
    """Calibrate, run and plan all cases. Raises RuntimeError with the end of the stderr of one that fails."""
    chosen = [case for case in CASES if case.num_ranks <= _MOST_RANKS]
    chosen = [case for case in chosen if not arguments.only or case.name in arguments.only]
    if arguments.dtype:
        chosen = [replace(case, more=(*case.more, f"model.dtype={arguments.dtype}")) for case in chosen]
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.devices or Path(scratch)
        for case in chosen:
            found = compare(case, _device(folder, case))
            print(case.name, *(f"{row['stage']} {row['error']:+.0%}" for row in found), sep=", ", file=sys.stderr)
            rows += found
    errors = [abs(float(row["error"])) for row in rows]  # type: ignore[arg-type]
    within = sum(error <= GOAL for error in errors)
    ratios = {"time_error_mean": statistics.mean(errors), "time_error_worst": max(errors)}
    return BenchTable(
        title=f"bench times: {len(chosen)} configs, planned and measured seconds of worker states",
        rows=rows,
        notes=(
            f"{within} of {len(rows)} within {GOAL:.0%}; mean error {ratios['time_error_mean']:.0%}, worst "
            f"{ratios['time_error_worst']:.0%}",
            f"measured is the fastest of {_STEPS - _WARM_UP_STEPS} steps; seconds hold for this machine and run only",
        ),
        details={"ratios": ratios},
    )


def _device(folder: Path, case: PlanCase) -> Path:
    """Return the device file of a case, made by the first of its kind."""
    model = [word for word in case.settings if word.startswith(("model.make.model_type=", "model.dtype="))]
    kind = dict(word.split("=") for word in model)
    family, dtype = kind.get("model.make.model_type", "qwen3"), kind["model.dtype"]
    file = folder / f"{family}_{dtype}_{case.num_ranks}.yaml"
    if not file.exists():
        words = [*case.settings, "resources.device=cpu", "--ranks", str(case.num_ranks)]
        _spmdrl("plan", *words, "--calibrate", str(file))
    return file


def compare(case: PlanCase, device: Path) -> list[dict[str, object]]:
    """Run and plan a case; returns a row for each worker state."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, file = Path(scratch) / "run", Path(scratch) / "plan.json"
        lengths = ["--prompt-length", str(LENGTHS.prompt), "--response-length", str(LENGTHS.response)]
        where = ["--ranks", str(case.num_ranks), "--device", str(device), "--json", str(file)]
        _spmdrl("plan", *case.settings, *lengths, *where)
        planned = json.loads(file.read_text())["stages"]
        settings = [*case.settings, f"train.max_steps={_STEPS}", f"run.dir={folder}"]
        job = run_job("train", *settings, ranks=case.num_ranks, kind="cpu", timeout=1200)
        if job.returncode:
            raise RuntimeError(f"{case.name} ended with {job.returncode}: {job.stderr[-2000:]}")
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()[_WARM_UP_STEPS:]]
    return [
        {"config": case.name, "ranks": case.num_ranks, "stage": name, "measured_s": measured,
         "planned_s": planned[name], "error": planned[name] / measured - 1}
        for name in _TIMED
        if name in planned
        for measured in [min(step[f"time/{name}"] for step in steps)]
    ]  # fmt: skip


def _spmdrl(*words: str) -> None:
    command: Sequence[str] = [sys.executable, "-m", "spmdrl", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words[:2])} ended with {done.returncode}: {done.stderr[-2000:]}")
