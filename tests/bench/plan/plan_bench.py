"""Plans beside runs on the simulated accelerator, whose allocator counts every byte: memory by owner and worker state.

Each case is a run of two steps with rows of one length, and a plan of the same config. Owners are what the run's ledger
lists at the end of a worker state; a peak is the largest that any rank's allocator held in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from spmdrl.observability.timeline import MemorySnapshot, read_timeline
from tests.bench.harness.bench_table import BenchTable
from tests.bench.plan.plan_cases import CASES, LENGTHS, PlanCase
from tests.support.jobs import run_job

_GIB = 1 << 30
# Given to the run's memory limit by the device; a plan reads a profile.
_DEVICE_GIB = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", metavar="CASE", help="; ".join(case.name for case in CASES))


def run(arguments: argparse.Namespace) -> BenchTable:
    """Run and plan all cases. Raises RuntimeError with the end of the stderr of one that fails."""
    chosen = [case for case in CASES if not arguments.only or case.name in arguments.only]
    rows = [compare(case) for case in chosen]
    ratios = {
        "memory_error_mean": statistics.mean(float(row["mean"]) for row in rows),  # type: ignore[arg-type]
        "memory_error_worst": max(float(row["worst"]) for row in rows),  # type: ignore[arg-type]
    }
    return BenchTable(
        title=f"bench plan: {len(rows)} configs, plan against the simulated accelerator",
        rows=rows,
        notes=(
            f"mean error {ratios['memory_error_mean']:.2%}, worst {ratios['memory_error_worst']:.2%}",
            "mean and worst are over the owners and peaks of a case; peak_mib is the largest of the run",
        ),
        details={"ratios": ratios},
    )


def compare(case: PlanCase) -> dict[str, object]:
    """Run and plan a case; returns its row."""
    with tempfile.TemporaryDirectory() as folder:
        planned = _planned(case, Path(folder))
        measured = _measured(case, Path(folder) / "run")
    errors = {name: planned.get(name, 0) / size - 1 for name, size in measured.items()}
    worst = max(errors, key=lambda name: abs(errors[name]))
    return {
        "config": case.name,
        "ranks": case.num_ranks,
        "peak_mib": max(size for name, size in measured.items() if name.endswith(" peak")) / (1 << 20),
        "figures": len(errors),
        "mean": statistics.mean(map(abs, errors.values())),
        "worst": abs(errors[worst]),
        "which": f"{worst}: {planned.get(worst, 0) / (1 << 20):.2f} for {measured[worst] / (1 << 20):.2f} MiB",
    }


def _measured(case: PlanCase, folder: Path) -> dict[str, int]:
    """Bytes by figure, the most of any rank."""
    job = run_job("train", *case.settings, f"run.dir={folder}", ranks=case.num_ranks, kind="sim", timeout=1200)
    if job.returncode:
        raise RuntimeError(f"{case.name} ended with {job.returncode}: {job.stderr[-2000:]}")
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    figures = {
        f"{name.removeprefix('mem/').removesuffix('_peak_gib')} peak": round(value * _GIB)
        for name, value in last.items()
        if name.startswith("mem/") and name.endswith("_peak_gib")
    }
    states = case.states
    figures = {name: size for name, size in figures.items() if name.removesuffix(" peak") in states}
    for snapshot in _snapshots(folder):
        if snapshot.held.stage in states:
            for owner, size in snapshot.held.device.items():
                if size and owner != "bucket":
                    figures[owner] = max(figures.get(owner, 0), size)
    return figures


def _snapshots(folder: Path) -> Iterator[MemorySnapshot]:
    yield from read_timeline(folder / "timeline").snapshots


def _planned(case: PlanCase, folder: Path) -> dict[str, int]:
    file = folder / "plan.json"
    words = [*case.settings, "--ranks", str(case.num_ranks), "--json", str(file)]
    lengths = ["--prompt-length", str(LENGTHS.prompt), "--response-length", str(LENGTHS.response)]
    command = [sys.executable, "-m", "tests.bench.plan.planned_as_simulated", *words, *lengths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode > 1 or not file.exists():
        raise RuntimeError(f"the plan of {case.name} ended with {done.returncode}: {done.stderr[-2000:]}")
    return figures_of(json.loads(file.read_text())["ranks"])


def figures_of(ranks: Sequence[Mapping[str, Mapping[str, Mapping[str, int]]]]) -> dict[str, int]:
    """Bytes by figure, the most of any rank."""
    figures: dict[str, int] = {}
    for one in ranks:
        for state, owners in one["slots"].items():
            for name, size in {f"{state} peak": sum(owners.values()), **owners}.items():
                figures[name] = max(figures.get(name, 0), size)
    return figures
