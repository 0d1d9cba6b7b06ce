"""What guards a run, timed piece by piece or left out: `train` on one rank, whose functions are wrapped or replaced.

    python -m tests.bench.training.safeguards timed|without OUT_FOLDER train FILE.yaml key.path=value ...

Pieces of the main thread count with the seconds that they take, those of pieces called inside them apart; duties of
the agent count with their processor seconds, per second of the run.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

_WATCH = "spmdrl.runtime.supervision"
MAIN_THREAD: Mapping[str, Sequence[str]] = {
    "fencing": ("spmdrl.runtime.supervision.fence:check_fence",),
    "fault points": ("spmdrl.observability.fault_points:faultpoint",),
    "account of rows": tuple(f"spmdrl.dataflow.samples.run_account:RunAccount.{name}" for name in ("open", "close")),
    "row records": tuple(
        f"spmdrl.job.rollouts.row_records:RowRecords.{name}" for name in ("rewarded", "taken", "trained", "write")
    ),
    "slow ranks": (
        f"{_WATCH}.main_thread:WorkSampler.working_seconds",
        "spmdrl.observability.slow_ranks:SlowRanks.warnings",
        "spmdrl.observability.slow_ranks:ratios",
    ),
    "progress counts": ("spmdrl.runtime.supervision.activity:Activity.advance",),
}
"""By piece, its functions, as `module:name`."""
THREADS: Mapping[str, Sequence[str]] = {
    "hang and stop watch": (f"{_WATCH}.watch:Watch._look", f"{_WATCH}.watch:Lines._run"),
    "slow ranks, looks": (f"{_WATCH}.main_thread:WorkSampler._look",),
}
"""By piece, what the agent does for it."""
_LEFT_OUT: Mapping[str, Callable[..., Any]] = {
    "RunAccount.close": lambda account, accounting: accounting,
    "WorkSampler.working_seconds": lambda sampler, stage_seconds: dict(stage_seconds),
    "SlowRanks.warnings": lambda slow, step, seconds_by_rank: [],
    "ratios": lambda seconds_by_rank: [1.0],
}
_RUNNING = (f"{_WATCH}.watch:Watch.running", f"{_WATCH}.main_thread:WorkSampler.running")
"""What gives the agent its duties."""


class PieceTimes:
    """Sums the time that each piece takes."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.shares: Counter[str] = Counter()
        """processor seconds per second of each piece's threads"""
        self._computed: Counter[str] = Counter()
        self._began: dict[str, float] = {}
        self._inside = threading.local()

    def called(self, piece: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its own seconds added to those of the piece."""

        @functools.wraps(function)
        def wrapper(*arguments: Any, **named: Any) -> Any:
            before, start = getattr(self._inside, "seconds", 0.0), time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                seconds = time.perf_counter() - start
                self.seconds[piece] += seconds - (getattr(self._inside, "seconds", 0.0) - before)
                self.calls[piece] += 1
                self._inside.seconds = before + seconds

        return wrapper

    def running(self, piece: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function of another thread, with its processor seconds per second since the piece's first call."""

        @functools.wraps(function)
        def wrapper(*arguments: Any) -> Any:
            before, began = time.thread_time(), self._began.setdefault(piece, time.perf_counter())
            try:
                return function(*arguments)
            finally:
                self._computed[piece] += time.thread_time() - before
                self.shares[piece] = self._computed[piece] / (time.perf_counter() - began)

        return wrapper


def replace(place: str, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `wrapped(function)` where a function is, also in modules that imported it by name."""
    module_name, _, name = place.partition(":")
    module = import_module(module_name)
    owner, _, method = name.rpartition(".")
    if owner:
        target = getattr(module, owner)
        setattr(target, method, wrapped(getattr(target, method)))
        return
    function = getattr(module, name)
    new = wrapped(function)
    for other in list(sys.modules.values()):
        if getattr(other, name, None) is function:
            setattr(other, name, new)


def time_pieces() -> PieceTimes:
    """Wrap all pieces."""
    times = PieceTimes()
    for pieces, wrapper in ((MAIN_THREAD, times.called), (THREADS, times.running)):
        for piece, places in pieces.items():
            for place in places:
                replace(place, functools.partial(wrapper, piece))
    return times


def leave_out_pieces() -> None:
    """Replace all pieces by functions that do nothing."""
    for place in [place for places in MAIN_THREAD.values() for place in places]:
        nothing = _LEFT_OUT.get(place.partition(":")[2], lambda *arguments, **named: None)
        replace(place, lambda function, nothing=nothing: nothing)
    for place in _RUNNING:
        replace(place, lambda function: lambda *arguments: nullcontext())


def main(mode: str, out: Path, words: Sequence[str]) -> int:
    """Run the words of a command line so, and write what was timed."""
    # Imported here, as benches know no command line; before the pieces are replaced where they were imported.
    command_line = import_module("spmdrl.cli.command_line")
    times = time_pieces() if mode == "timed" else None
    if times is None:
        leave_out_pieces()
    code = int(command_line.main(list(words)))
    if times is not None:
        content = {"seconds": times.seconds, "calls": times.calls, "shares": times.shares}
        (out / f"pieces_{int(os.environ['RANK'])}.json").write_text(json.dumps(content))
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
