"""Served pages: seconds of the index and of a run's page, and the server's memory while a run goes on.

Made-up runs, whose lines are as long as those of real ones, lie in one folder; `spmdrl report FOLDER --serve` runs in a
process of its own. Then one of the runs makes steps, and its page and the index are asked for again and again, as by an
open page with `--pace`. An hour of a real run's lines, with one run in the folder:

    python -m tests.bench pages --runs 1 --like runs/my_run --live 3600 --pace 1
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bench.harness.bench_table import BenchTable
from tests.observability.synthetic import write_run
from tests.support.jobs import ROOT, environment

LINE_BYTES = 3100
INDEX_SECONDS, PAGE_SECONDS = 1.0, 2.0
# Up to 1 MiB comes in the first thousand requests, and 1.4 MiB between the halves of a thousand steps.
MOST_GROWTH_MIB = 2.0
_STEP = re.compile(r'"step": \d+')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=1000, help="steps of each run")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--live", type=int, default=1000, help="steps that one run makes while it is looked at")
    parser.add_argument("--requests", type=int, default=500, help="requests without a new step")
    parser.add_argument("--like", type=Path, metavar="RUN_DIR", help="a run to copy in place of made-up ones")
    parser.add_argument("--pace", type=float, default=0.0, metavar="SECONDS", help="seconds per new step")


def run(arguments: argparse.Namespace) -> BenchTable:
    with tempfile.TemporaryDirectory(prefix="spmdrl-bench-") as name:
        top = Path(name) / "runs"
        first = _make_runs(top, arguments)
        with _served(top) as client:
            index, _ = client.timed("runs.json")
            again, _ = client.timed("runs.json")
            page, body = client.timed("run/run_000/")
            memory = [client.resident_mib]
            for _ in range(arguments.requests):
                client.timed("runs.json")
                client.timed("run/run_000/parts.json?known=1000000")
            memory.append(client.resident_mib)
            updates = list(_live(first, client, arguments))
    seconds = sorted(took for took, _ in updates)
    live = [resident for _, resident in updates]
    rows = [
        {"what": f"index of {arguments.runs} runs of {arguments.steps} steps, first", "s": index},
        {"what": "index, nothing new", "s": again},
        {"what": f"a run's page, {len(body) >> 10} KiB", "s": page},
        {"what": f"its parts after new steps, median of {len(seconds)}", "s": seconds[len(seconds) // 2]},
    ]
    half = len(live) // 2
    notes = (
        f"resident MiB after {2 * arguments.requests} requests without a new step: {memory[0]:.1f} -> {memory[1]:.1f}",
        f"resident MiB over {arguments.live} new steps, by quarters: "
        + ", ".join(f"{live[at * (len(live) - 1) // 4]:.1f}" for at in range(5)),
    )
    is_flat = memory[1] - memory[0] < MOST_GROWTH_MIB and max(live[half:]) - max(live[:half]) < MOST_GROWTH_MIB
    return BenchTable(
        title=f"bench pages: {arguments.runs} runs of {arguments.steps} steps on {arguments.ranks} ranks",
        rows=rows, notes=notes, details={"resident_mib": live, "update_seconds": seconds},
        passed=index < INDEX_SECONDS and page < PAGE_SECONDS and is_flat,
    )  # fmt: skip


def _make_runs(top: Path, arguments: argparse.Namespace) -> Path:
    """Write one run, and as many copies; only what the index reads takes room for each of them."""
    if arguments.like:
        return Path(shutil.copytree(arguments.like, top / "run_000"))
    first = write_run(top / "run_000", num_steps=arguments.steps, num_ranks=arguments.ranks, samples_per_step=12)
    path = first / "metrics.jsonl"
    path.write_text("".join(map(_as_long, path.read_text().splitlines())))
    for number in range(1, arguments.runs):
        copy = top / f"run_{number:03d}"
        shutil.copytree(first, copy, copy_function=lambda source, target: _copied(source, target))
    return first


def _copied(source: str, target: str) -> None:
    (os.link if source.endswith(("samples.jsonl", "samples.jsonl.gz")) else shutil.copyfile)(source, target)


def _as_long(line: str) -> str:
    """A line of metrics with as many numbers as one of a real run."""
    record, number = json.loads(line), 0
    while len(line) < LINE_BYTES:
        record[f"environment/seconds/tool_{number}"] = 0.1234567890123 * (number + 1)
        number += 1
        line = json.dumps(record, sort_keys=True)
    return line + "\n"


def _live(run_dir: Path, client: _Client, arguments: argparse.Namespace) -> Iterator[tuple[float, float]]:
    """Yield seconds of an update and resident MiB after it, while the run makes the steps that it has made before."""
    files = [run_dir / "metrics.jsonl", run_dir / "samples.jsonl", *run_dir.glob("timeline/*.jsonl")]
    known = [_lines_by_step(path) for path in files]
    made, version, started = sorted(known[0]), 0, time.monotonic()
    every = max(1, round(3 / arguments.pace) if arguments.pace else arguments.live // 20)
    for number in range(arguments.live):
        time.sleep(max(0.0, started + number * arguments.pace - time.monotonic()))
        for path, lines in zip(files, known, strict=True):
            again = "".join(lines.get(made[number % len(made)], []))
            with path.open("a") as file:
                file.write(_STEP.sub(f'"step": {made[-1] + number + 1}', again))
        if number % every == 0:
            client.timed("runs.json")
            before = version
            while True:
                seconds, body = client.timed(f"run/run_000/parts.json?known={before}")
                version = json.loads(body)["version"]
                # The server rests between two makings of a page; an open page doesn't wait for it.
                if version > before or arguments.pace:
                    break
                time.sleep(0.1)
            yield seconds, client.resident_mib


def _lines_by_step(path: Path) -> dict[int, list[str]]:
    """Return a file's lines of each training step."""
    found: dict[int, list[str]] = {}
    for line in path.read_text().splitlines(keepends=True):
        if (step := json.loads(line)["step"]) > 0:
            found.setdefault(step, []).append(line)
    return found


class _Client:
    def __init__(self, address: str, pid: int):
        self._host, self._base = address.split("/")[2], f"/{address.split('/')[3]}/"
        self._pid = pid

    def timed(self, path: str) -> tuple[float, bytes]:
        started = time.perf_counter()
        connection = http.client.HTTPConnection(self._host, timeout=600)
        connection.request("GET", self._base + path)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        assert answer.status == 200, (path, answer.status)
        return time.perf_counter() - started, body

    @property
    def resident_mib(self) -> float:
        pages = int(Path(f"/proc/{self._pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


@contextmanager
def _served(top: Path) -> Iterator[_Client]:
    command = [sys.executable, "-m", "spmdrl", "report", str(top), "--serve"]
    with subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield _Client(server.stdout.readline().split()[1], server.pid)
        finally:
            server.terminate()
