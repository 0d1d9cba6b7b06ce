"""Which stage each rank was in, and what memory it held: one JSONL file a rank, also as a Perfetto trace."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl.observability.jsonl import JsonlWriter, number, read_jsonl, to_json, write_atomic


@dataclass(frozen=True)
class Span:
    """One stage of one step on one rank; `start` and `end` are seconds since the epoch."""

    rank: int
    step: int
    stage: str
    start: float
    end: float
    error: str = ""
    background: bool = False
    """whether it ran beside the stages, in none of their seconds"""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class MemorySnapshot:
    """Bytes by owner that one rank held at a stage boundary, on its device and on the host."""

    rank: int
    step: int
    stage: str
    time: float
    device: dict[str, int]
    host: dict[str, int]


@dataclass(frozen=True)
class TimelineRecords:
    """All that the ranks of a run wrote, in the order of time."""

    spans: list[Span]
    snapshots: list[MemorySnapshot]


def timeline_file(run_dir: Path, rank: int) -> Path:
    """Where a rank of a run writes its timeline."""
    return run_dir / "timeline" / f"rank_{rank:05d}.jsonl"


class Timeline:
    """Writes the stages of one rank as they end, so that a killed run keeps all but the stage it died in."""

    def __init__(self, path: Path, rank: int):
        self.rank = rank
        self._writer = JsonlWriter(Path(path))
        # Wall time places ranks beside each other; the monotonic clock measures, so that no clock change bends a stage.
        self._epoch = time.time() - time.perf_counter()
        self._seconds: dict[int, dict[str, float]] = {}

    @contextmanager
    def stage(self, name: str, step: int) -> Iterator[None]:
        """Time the block as stage `name` of `step`; a block that raises is written too, with the error's name."""
        start, error = self._now(), ""
        try:
            yield
        except BaseException as raised:
            error = type(raised).__name__
            raise
        finally:
            self._finish(Span(self.rank, step, name, start, self._now(), error))

    def background(self, name: str, step: int, *, start: float, end: float) -> None:
        """Write what ran beside the stages of `step`, from `start` to `end` by `time.perf_counter`."""
        self._write(Span(self.rank, step, name, self._epoch + start, self._epoch + end, background=True))

    def memory(
        self, step: int, stage: str, device: Mapping[str, int], *, host: Mapping[str, int] | None = None
    ) -> None:
        """Write the bytes by owner held on the device (and, if told, on the host) when `stage` ended."""
        line = {"rank": self.rank, "step": step, "stage": stage, "time": self._now(), "memory": dict(device)}
        self._writer.write(line | ({"host": dict(host)} if host else {}))

    def stage_seconds(self, step: int) -> dict[str, float]:
        """Seconds of this rank by stage in `step`; only the two newest steps are remembered."""
        return dict(self._seconds.get(step, {}))

    def truncate_after(self, step: int) -> None:
        """Forget what a run that resumes after `step` will do again."""
        self._writer.truncate_after(step)

    def close(self) -> None:
        self._writer.close()

    def _now(self) -> float:
        return self._epoch + time.perf_counter()

    def _finish(self, span: Span) -> None:
        seconds = self._seconds.setdefault(span.step, {})
        seconds[span.stage] = seconds.get(span.stage, 0.0) + span.seconds
        for old in sorted(self._seconds)[:-2]:
            del self._seconds[old]
        self._write(span)

    def _write(self, span: Span) -> None:
        line = {"rank": span.rank, "step": span.step, "stage": span.stage, "start": span.start, "end": span.end}
        error = {"error": span.error} if span.error else {}
        self._writer.write(line | error | ({"background": True} if span.background else {}))


def read_timeline(folder: Path) -> TimelineRecords:
    """Read every rank's file of a timeline folder; missing files and broken lines are left out."""
    spans: list[Span] = []
    snapshots: list[MemorySnapshot] = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in read_jsonl(path):
            record = _record_of(line)
            if isinstance(record, Span):
                spans.append(record)
            elif record is not None:
                snapshots.append(record)
    spans.sort(key=lambda span: (span.start, span.rank))
    snapshots.sort(key=lambda snapshot: (snapshot.time, snapshot.rank))
    return TimelineRecords(spans, snapshots)


def write_perfetto(folder: Path, out: Path) -> None:
    """Write a timeline folder as Chrome trace JSON, which ui.perfetto.dev opens; a rank is a process there."""
    records = read_timeline(folder)
    times = [span.start for span in records.spans] + [snapshot.time for snapshot in records.snapshots]
    origin = min(times, default=0.0)
    ranks = sorted({span.rank for span in records.spans} | {snapshot.rank for snapshot in records.snapshots})
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}} for rank in ranks
    ]
    events += [_stage_event(span, origin) for span in records.spans]
    events += [_memory_event(snapshot, origin) for snapshot in records.snapshots]
    write_atomic(Path(out), to_json({"displayTimeUnit": "ms", "traceEvents": events}))


def _stage_event(span: Span, origin: float) -> dict[str, Any]:
    arguments = {"step": span.step} | ({"error": span.error} if span.error else {})
    start, duration = (span.start - origin) * 1e6, span.seconds * 1e6
    return {"name": span.stage, "cat": "stage", "ph": "X", "pid": span.rank, "tid": int(span.background), "ts": start,
            "dur": duration, "args": arguments}  # fmt: skip


def _memory_event(snapshot: MemorySnapshot, origin: float) -> dict[str, Any]:
    micros = (snapshot.time - origin) * 1e6
    return {"name": "device memory", "ph": "C", "pid": snapshot.rank, "ts": micros, "args": snapshot.device}


def _record_of(line: Mapping[str, Any]) -> Span | MemorySnapshot | None:
    rank, step, stage = line.get("rank"), line.get("step"), line.get("stage")
    if not (isinstance(rank, int) and isinstance(step, int) and isinstance(stage, str)):
        return None
    start, end, moment = (number(line.get(key)) for key in ("start", "end", "time"))
    if start is not None and end is not None:
        background = line.get("background") is True
        return Span(rank, step, stage, start, max(start, end), str(line.get("error", "")), background)
    if moment is not None:
        device, host = _bytes_by_owner(line.get("memory")), _bytes_by_owner(line.get("host"))
        return MemorySnapshot(rank, step, stage, moment, device, host)
    return None


def _bytes_by_owner(value: object) -> dict[str, int]:
    if not isinstance(value, Mapping):
        return {}
    return {str(owner): int(amount) for owner, amount in value.items() if isinstance(amount, int)}
