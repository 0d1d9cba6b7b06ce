"""The sample flow on one node: rows from one process to another, through the dock and through what others use.

Rows have the columns of the paper's Eq. 2: one as long as the prompt, five as long as the response, three scalars.
They are put and got in chunks, all padded to one length, then with responses of log-normal lengths. The limit is
memcpy: the same packed columns copied into kept memory and out again, in one process. All run in turn in each round.
The dock's rows go through a step's worker states; generation puts chunks, later states all that they make, as in a run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from spmdrl.bench.harness.bench_table import BenchTable
from spmdrl.bench.harness.lone_modules import copy_modules
from spmdrl.bench.harness.peers import run_to_end
from spmdrl.bench.samples.sample_driver import Measured, Settings, measure_memcpy
from spmdrl.bench.samples.sample_rows import Rows, RowsSize, padded_rows, ragged_rows

MEMCPY, VIEWS, COPIES = "memcpy", "dock", "dock, copied out"
HEADLINE = VIEWS
PEERS = {
    "tcp_pickle": "sample_tcp",
    "tcp_pickle_packed": "sample_tcp",
    "ray": "sample_peers",
    "transferqueue": "sample_peers",
}
GOAL_OF_MEMCPY, GOAL_P50_MICROSECONDS = 0.5, 20
# What runs in the peers' own environment: plain files, without what else this package needs.
_COPIED_MODULES = ("sample_driver", "sample_peers", "sample_rows", "sample_tcp")
_WARM_UP, _STEPS = 2, 3
_LONGEST_SECONDS = 300.0
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TQ_LOGGING_LEVEL": "ERROR",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--groups", type=int, default=128, help="prompts")
    parser.add_argument("--group-size", type=int, default=8, help="responses a prompt")
    parser.add_argument("--prompt-length", type=int, default=512, help="tokens")
    parser.add_argument("--response-length", type=int, default=4096, help="tokens of the longest response")
    parser.add_argument("--chunk", type=int, default=256, help="rows of one put or get")
    parser.add_argument("--rounds", type=int, default=3, help="how often all run in turn")
    parser.add_argument("--requests", type=int, default=2000, help="timed requests for metadata, over all rounds")
    parser.add_argument("--peer-python", default=sys.executable, help="Python that has Ray and TransferQueue")


@dataclass
class Way:
    """What was measured of one way to bring rows from one process to another, over all rounds."""

    by_shape: dict[str, Measured] = field(default_factory=dict)
    missing: str | None = None
    """why nothing was"""

    def add(self, found: Mapping[str, Measured]) -> None:
        for shape, measured in found.items():
            whole = self.by_shape.setdefault(shape, Measured())
            for part in fields(Measured):
                getattr(whole, part.name).extend(getattr(measured, part.name))


def run(arguments: argparse.Namespace) -> BenchTable:
    """Measure all in turn. Raises RuntimeError if the dock fails; another way that fails has a row that says so."""
    size = RowsSize(arguments.groups, arguments.group_size, arguments.prompt_length, arguments.response_length)
    shapes = {"padded": padded_rows(size), "ragged": ragged_rows(size)}
    requests = -(-arguments.requests // (arguments.rounds * len(shapes)))
    settings = Settings(tuple(shapes), arguments.chunk, _WARM_UP, _STEPS, requests)
    ways = {name: Way() for name in (MEMCPY, VIEWS, COPIES, *PEERS)}
    extra: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="spmdrl-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        _write(folder, shapes, settings)
        for _ in range(arguments.rounds):
            ways[MEMCPY].add({shape: measure_memcpy(rows, settings) for shape, rows in shapes.items()})
            extra.append(_measure_dock(folder, ways))
            for peer, way in ways.items():
                if peer in PEERS and way.missing is None:
                    _measure_peer(peer, arguments.peer_python, folder, way)
    return summarize(ways, shapes, extra, arguments.rounds)


def _write(folder: Path, shapes: Mapping[str, Rows], settings: Settings) -> None:
    """Lay out what the other processes read: rows, settings, and the modules for the peers' Python."""
    for shape, rows in shapes.items():
        rows.save(folder / f"{shape}.npz")
    (folder / "settings.json").write_text(json.dumps(asdict(settings)))
    copy_modules("spmdrl.bench.samples", _COPIED_MODULES, folder / "modules")


def _environment(folder: Path) -> dict[str, str]:
    """Variables of a command; what it leaves in temporary files goes with the folder."""
    return {**_ENVIRONMENT, "TMPDIR": str(folder)}


def _measure_dock(folder: Path, ways: Mapping[str, Way]) -> dict[str, Any]:
    """Add a round of the dock; returns the figures that other ways don't have, by shape."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run_to_end(
        [*launcher, "-m", "spmdrl.bench.samples.sample_ranks", str(folder)], _environment(folder), _LONGEST_SECONDS
    )
    found = json.loads((folder / "result.json").read_text())["shapes"]
    extra: dict[str, Any] = {}
    for shape, values in found.items():
        own = {part.name: values.pop(part.name) for part in fields(Measured)}
        views = Measured(**own)
        both = [get + copy for get, copy in zip(views.get_seconds, values["copy_seconds"], strict=True)]
        ways[VIEWS].add({shape: views})
        ways[COPIES].add({shape: replace(views, get_seconds=both)})
        extra[shape] = values
    return extra


def _measure_peer(name: str, python: str, folder: Path, way: Way) -> None:
    """Add a round of another way, or why there is none."""
    command = [python, "-m", f"spmdrl.bench.samples.{PEERS[name]}", name, str(folder)]
    try:
        run_to_end(command, {**_environment(folder), "PYTHONPATH": str(folder / "modules")}, _LONGEST_SECONDS)
    except (RuntimeError, OSError) as error:
        way.missing = str(error).splitlines()[-1]
        return
    result = json.loads((folder / "result.json").read_text())
    way.missing = result.get("missing")
    way.add({shape: Measured(**values) for shape, values in result.get("shapes", {}).items()})


def summarize(
    ways: Mapping[str, Way], shapes: Mapping[str, Rows], extra: list[dict[str, Any]], rounds: int
) -> BenchTable:
    """The table, and ratios of the dock to each other way."""
    rows = [_row(shape, name, way, shapes[shape], ways[MEMCPY]) for shape in shapes for name, way in ways.items()]
    figures = {(row["rows"], row["way"]): row for row in rows}
    ratios = {
        f"{shape}_vs_{name}": figures[shape, HEADLINE]["put + get GB/s"] / figures[shape, name]["put + get GB/s"]
        for shape in shapes
        for name in (MEMCPY, *PEERS)
        if ways[name].by_shape
    }
    copied = {
        f"{shape}_vs_{MEMCPY}": figures[shape, COPIES]["put + get GB/s"] / figures[shape, MEMCPY]["put + get GB/s"]
        for shape in shapes
    }
    requests = [seconds for measured in ways[VIEWS].by_shape.values() for seconds in measured.request_seconds]
    p50, p99 = (_microseconds(requests, share) for share in (0.5, 0.99))
    some = next(iter(shapes.values()))
    return BenchTable(
        title=f"bench samples: {some.num_rows} rows in groups of {some.group_size}, medians of {rounds * _STEPS} steps",
        columns=tuple(rows[0]),
        rows=rows,
        notes=_NOTES,
        details={
            "ratios": ratios,
            "ratios_copied_out": copied,
            "metadata_p50_us": p50,
            "metadata_p99_us": p99,
            "goals": {"of_memcpy": GOAL_OF_MEMCPY, "metadata_p50_us": GOAL_P50_MICROSECONDS},
            "payload_bytes": {shape: rows.payload_bytes for shape, rows in shapes.items()},
            "dock": extra,
        },
    )


_NOTES = (
    "GB/s: payload once for put, once for get, twice for both; the dock stores a prompt once for its group, all others "
    "once a row",
    f"of memcpy: put + get; goals: {GOAL_OF_MEMCPY} padded and ragged; the ratios of --json are those of '{HEADLINE}', "
    "what taking returns: views where rows lie together",
    f"p50, p99: of a request whether rows are ready; goal: {GOAL_P50_MICROSECONDS} us at the median",
    "RSS: producer / consumer in MB, with shared memory, without processes of the store",
)


def _row(shape: str, name: str, way: Way, rows: Rows, limit: Way) -> dict[str, Any]:
    found = way.by_shape.get(shape)
    row: dict[str, Any] = {"rows": shape, "way": name}
    if found is None:
        return row | dict.fromkeys(_FIGURES) | {"remark": way.missing}
    put, get, both = _medians(found)
    gigabytes = rows.payload_bytes / 1e9
    figures: tuple[object, ...] = (
        gigabytes / put,
        gigabytes / get,
        2 * gigabytes / both,
        _medians(limit.by_shape[shape])[2] / both,
        1e6 * both / rows.num_rows,
        _microseconds(found.request_seconds, 0.5),
        _microseconds(found.request_seconds, 0.99),
        " / ".join(f"{size / 1e6:.0f}" for size in found.resident_bytes[-2:]) or None,
    )
    return row | dict(zip(_FIGURES, figures, strict=True)) | {"remark": way.missing or ""}


_FIGURES = ("put GB/s", "get GB/s", "put + get GB/s", "of memcpy", "us/row", "p50 us", "p99 us", "RSS")


def _medians(found: Measured) -> tuple[float, float, float]:
    """Seconds of putting, getting, and both."""
    both = [put + get for put, get in zip(found.put_seconds, found.get_seconds, strict=True)]
    return statistics.median(found.put_seconds), statistics.median(found.get_seconds), statistics.median(both)


def _microseconds(seconds: list[float], share: float) -> float | None:
    """A quantile."""
    return 1e6 * sorted(seconds)[int(share * len(seconds))] if seconds else None
