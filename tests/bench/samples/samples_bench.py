"""The sample flow on one node: rows from one process to another through the dock, beside memcpy.

Rows have the columns of the paper's Eq. 2: one as long as the prompt, five as long as the response, three scalars.
They are put and got in chunks, all padded to one length, then with responses of log-normal lengths. The limit is
memcpy: the same packed columns copied into kept memory and out again, in one process. Both run in turn in each round.
The dock's rows go through a step's worker states; generation puts chunks, later states all that they make, as in a run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from spmdrl.config.reader import start_up
from tests.bench.harness.bench_ranks import BenchRanks
from tests.bench.harness.bench_table import BenchTable
from tests.bench.harness.in_turn import ContenderResults, in_turn
from tests.bench.samples.sample_ranks import DockFigures, StoreFigures, StoreTask, measure_dock
from tests.bench.samples.sample_rows import KeptMemory, Rows, RowsSize, padded_rows, ragged_rows

MEMCPY, VIEWS, COPIES = "memcpy", "dock", "dock, copied out"
HEADLINE = VIEWS
GOAL_OF_MEMCPY, GOAL_P50_MICROSECONDS = 0.5, 20
_WARM_UP, _STEPS = 2, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--groups", type=int, default=128, help="prompts")
    parser.add_argument("--group-size", type=int, default=8, help="responses per prompt")
    parser.add_argument("--prompt-length", type=int, default=512, help="tokens")
    parser.add_argument("--response-length", type=int, default=4096, help="tokens of the longest response")
    parser.add_argument("--chunk", type=int, default=256, help="rows of one put or get")
    parser.add_argument("--rounds", type=int, default=3, help="how often all run in turn")
    parser.add_argument("--requests", type=int, default=2000, help="timed requests for metadata, over all rounds")


Ways = Mapping[str, ContenderResults[Mapping[str, StoreFigures]]]
"""what each way to bring rows from one process to another took, by shape of the rows"""


def run(arguments: argparse.Namespace) -> BenchTable:
    """Measure both in turn."""
    with start_up():
        size = RowsSize(arguments.groups, arguments.group_size, arguments.prompt_length, arguments.response_length)
    shapes = {"padded": padded_rows(size), "ragged": ragged_rows(size)}
    requests = -(-arguments.requests // (arguments.rounds * len(shapes)))
    task = StoreTask(arguments.chunk, _WARM_UP, _STEPS, requests)
    ways: dict[str, Any] = {
        MEMCPY: lambda: {shape: measure_memcpy(rows, task) for shape, rows in shapes.items()},
        VIEWS: lambda: _measure_dock(shapes, task),
    }
    found = in_turn(ways, arguments.rounds)
    dock = found.pop(VIEWS).results
    views = ContenderResults([{shape: each.store for shape, each in by_shape.items()} for by_shape in dock])
    copies = ContenderResults([{shape: _with_copies(each) for shape, each in by_shape.items()} for by_shape in dock])
    return summarize({MEMCPY: found.pop(MEMCPY), VIEWS: views, COPIES: copies}, shapes, dock)


def _measure_dock(shapes: Mapping[str, Rows], task: StoreTask) -> dict[str, DockFigures]:
    shares = BenchRanks(2, start_method="forkserver").call(measure_dock, task, shapes)
    return {
        shape: DockFigures.of([share[shape] for share in shares], rows, task.warm_up) for shape, rows in shapes.items()
    }


def _with_copies(dock: DockFigures) -> StoreFigures:
    both = [get + copy for get, copy in zip(dock.store.get_seconds, dock.copy_seconds, strict=True)]
    return replace(dock.store, get_seconds=both)


def measure_memcpy(rows: Rows, task: StoreTask) -> StoreFigures:
    """Copy all columns into kept memory, and from there into other kept memory, in this process with one thread."""
    chunks, memory, found = list(rows.parts(task.chunk)), KeptMemory(), StoreFigures()
    for step in range(task.warm_up + task.steps):
        start = time.perf_counter()
        stored = [_copied(chunk, memory, ("in", number)) for number, chunk in enumerate(chunks)]
        middle = time.perf_counter()
        for number, chunk in enumerate(stored):
            _copied(chunk, memory, ("out", number))
        stop = time.perf_counter()
        if step >= task.warm_up:
            found.put_seconds.append(middle - start)
            found.get_seconds.append(stop - middle)
    return found


def _copied(rows: Rows, memory: KeptMemory, place: tuple[str, int]) -> Rows:
    columns = {name: memory.copy((*place, name), values) for name, values in rows.columns.items()}
    return Rows(rows.group_size, memory.copy(place, rows.offsets), columns)


def summarize(ways: Ways, shapes: Mapping[str, Rows], dock: Sequence[Mapping[str, DockFigures]]) -> BenchTable:
    """The table, and ratios of the dock to memcpy."""
    rows = [_row(shape, name, ways, shapes[shape]) for shape in shapes for name in ways]
    rates = {(row["rows"], row["way"]): row["put + get GB/s"] for row in rows}
    ratios = {f"{shape}_vs_{MEMCPY}": rates[shape, HEADLINE] / rates[shape, MEMCPY] for shape in shapes}
    copied = {f"{shape}_vs_{MEMCPY}": rates[shape, COPIES] / rates[shape, MEMCPY] for shape in shapes}
    requests = [seconds for shape in shapes for seconds in _figures(ways[VIEWS], shape).request_seconds]
    some = next(iter(shapes.values()))
    return BenchTable(
        title=f"bench samples: {some.num_rows} rows in groups of {some.group_size}, medians of "
        f"{len(dock) * _STEPS} steps",
        rows=rows,
        notes=_NOTES,
        details={
            "ratios": ratios,
            "ratios_copied_out": copied,
            "metadata_p50_us": _microseconds(requests, 0.5),
            "metadata_p99_us": _microseconds(requests, 0.99),
            "goals": {"of_memcpy": GOAL_OF_MEMCPY, "metadata_p50_us": GOAL_P50_MICROSECONDS},
            "payload_bytes": {shape: rows.payload_bytes for shape, rows in shapes.items()},
            "dock": [{shape: _extra(figures) for shape, figures in by_shape.items()} for by_shape in dock],
        },
    )


def _extra(dock: DockFigures) -> dict[str, Any]:
    """The figures that other ways don't have."""
    return {name: value for name, value in asdict(dock).items() if name != "store"}


def _figures(turns: ContenderResults[Mapping[str, StoreFigures]], shape: str) -> StoreFigures:
    """All rounds of one way together."""
    whole = StoreFigures()
    for found in turns.results:
        for name, values in asdict(found[shape]).items():
            getattr(whole, name).extend(values)
    return whole


_NOTES = (
    "GB/s: payload once for put, once for get, twice for both; the dock stores a prompt once for its group",
    f"of memcpy: put + get; goals: {GOAL_OF_MEMCPY} padded and ragged; the ratios of --json are those of '{HEADLINE}', "
    "what taking returns: views where rows lie together",
    f"p50, p99: of a request for ready rows; goal: {GOAL_P50_MICROSECONDS} us at the median",
    "RSS: producer / consumer in MB, with shared memory, without processes of the store",
)


def _row(shape: str, name: str, ways: Ways, rows: Rows) -> dict[str, Any]:
    row: dict[str, Any] = {"rows": shape, "way": name}
    found, limit = _figures(ways[name], shape), _figures(ways[MEMCPY], shape)
    both, gigabytes = _median_of_both(found), rows.payload_bytes / 1e9
    figures: tuple[object, ...] = (
        gigabytes / statistics.median(found.put_seconds),
        gigabytes / statistics.median(found.get_seconds),
        2 * gigabytes / both,
        _median_of_both(limit) / both,
        1e6 * both / rows.num_rows,
        _microseconds(found.request_seconds, 0.5),
        _microseconds(found.request_seconds, 0.99),
        " / ".join(f"{size / 1e6:.0f}" for size in found.resident_bytes[-2:]) or None,
    )
    return row | dict(zip(_FIGURES, figures, strict=True))


_FIGURES = ("put GB/s", "get GB/s", "put + get GB/s", "of memcpy", "us/row", "p50 us", "p99 us", "RSS")


def _median_of_both(found: StoreFigures) -> float:
    """Seconds of putting and getting."""
    return statistics.median(put + get for put, get in zip(found.put_seconds, found.get_seconds, strict=True))


def _microseconds(seconds: list[float], share: float) -> float | None:
    """A quantile."""
    return 1e6 * sorted(seconds)[int(share * len(seconds))] if seconds else None
