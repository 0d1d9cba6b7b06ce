"""Timeline of each rank's stages, moved bytes and held memory: files by rank, and a Perfetto trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl.observability.jsonl import to_json, write_atomic
from spmdrl.observability.timeline_lines import HeldMemory, LineReader, LineWriter, MemorySnapshot, Moved, Span
from spmdrl.observability.timeline_parts import PART_BYTES, PartedWriter, read_folder, truncate_file
from spmdrl.runtime.supervision.activity import activity

__all__ = [
    "HeldMemory", "MemorySnapshot", "Moved", "Span", "Timeline", "TimelineRecords", "read_timeline", "timeline_file",
    "write_perfetto",
]  # fmt: skip


@dataclass(frozen=True)
class TimelineRecords:
    """Records of all ranks of a run, by time."""

    spans: list[Span]
    snapshots: list[MemorySnapshot]


@dataclass(frozen=True)
class Waits:
    """Seconds that a stage waited for answers, and the part in which other stages worked."""

    seconds: float
    hidden_seconds: float


def timeline_file(run_dir: Path, rank: int) -> Path:
    """Return the path of a rank's timeline."""
    return run_dir / "timeline" / f"rank_{rank:05d}.jsonl"


def truncate_other_ranks(run_dir: Path, num_ranks: int, step: int) -> None:
    """Remove steps that will be repeated from files of ranks that this job lacks."""
    for path in (run_dir / "timeline").glob("rank_*.jsonl"):
        digits = path.name.removeprefix("rank_").removesuffix(".jsonl")
        if digits.isascii() and digits.isdigit() and int(digits) >= num_ranks:
            truncate_file(path, step)


class Timeline:
    """Writer of one rank's stages as they end, so that a killed run loses only its last stage."""

    def __init__(self, path: Path, rank: int, *, shown: Callable[[str], AbstractContextManager[object]] = nullcontext,
                 part_bytes: int = PART_BYTES):  # fmt: skip
        """`shown(name)` is a context around each stage, such as one that shows its name on a screen."""
        self.rank = rank
        self._shown = shown
        # Wall time aligns ranks; the monotonic clock measures, so that clock changes don't distort a stage.
        self._epoch = time.time() - time.perf_counter()
        self._lines = LineWriter(rank, round(self._now(), 6))
        self._writer = PartedWriter(Path(path), self._lines.header, part_bytes=part_bytes)
        self._seconds: dict[int, dict[str, float]] = {}
        self._waits: dict[int, dict[str, Waits]] = {}
        self._ended: dict[int, list[Span]] = {}
        self._inside_open_stages: list[float] = []
        self._moved_in_open_stages: list[list[Moved]] = []
        self.held: HeldMemory | None = None
        """Memory held at the last boundary."""
        self.failed_stage: str | None = None
        """Innermost stage that the last error ended; None once another has begun."""

    @contextmanager
    def stage(self, name: str, step: int) -> Iterator[None]:
        """Time the block as stage `name` of `step`; a block that raises is written too, with the error's name."""
        start, error, moved = self._now(), "", list[Moved]()
        self.failed_stage = None
        self._moved_in_open_stages.append(moved)
        self._inside_open_stages.append(0.0)
        try:
            with activity.in_stage(name, step), self._shown(name):
                yield
        except BaseException as raised:
            error = type(raised).__name__
            self.failed_stage = self.failed_stage or name
            raise
        finally:
            self._moved_in_open_stages.pop()
            self._finish(Span(self.rank, step, name, start, self._now(), error, moved=tuple(moved)))

    def note_moved(self, moved: Moved) -> None:
        """Add to the bytes that the innermost open stage moved."""
        assert self._moved_in_open_stages, f"{moved} was moved outside any stage"
        self._moved_in_open_stages[-1].append(moved)

    def background(self, name: str, step: int, *, start: float, end: float, moved: Sequence[Moved] = ()) -> None:
        """Write a background span of `step`, from `start` to `end` by `time.perf_counter`."""
        begun, ended = self._epoch + start, self._epoch + end
        self._write(Span(self.rank, step, name, begun, ended, background=True, moved=tuple(moved)))

    def waited(self, stage: str, step: int, *, start: float, end: float) -> None:
        """Add a wait of `stage` from `start` to `end` by `time.perf_counter`, and the part that others hid."""
        begun, ended = self._epoch + start, self._epoch + end
        others = [span for span in self._ended.get(step, []) if span.stage != stage]
        hidden = sum(max(0.0, min(ended, span.end) - max(begun, span.start)) for span in others)
        known = self._waits.setdefault(step, {}).get(stage, Waits(0.0, 0.0))
        if ended > begun:
            self._waits[step][stage] = Waits(known.seconds + ended - begun, known.hidden_seconds + hidden)

    def end_of(self, stage: str, step: int) -> float | None:
        """Return the last end of `stage` in `step`, by `time.perf_counter`."""
        ends = [span.end for span in self._ended.get(step, []) if span.stage == stage]
        return ends[-1] - self._epoch if ends else None

    def waits(self, step: int) -> dict[str, Waits]:
        """Return this rank's waits in `step` by stage; only the two newest steps are kept."""
        return dict(self._waits.get(step, {}))

    def memory(self, step: int, held: HeldMemory) -> None:
        """Write this rank's held memory at the end of a stage of `step`."""
        self.held = held
        self._writer.write(self._lines.memory(step, self._now(), held))

    def stage_seconds(self, step: int) -> dict[str, float]:
        """Return this rank's own seconds by stage in `step`, without inner stages; the two newest steps only."""
        return dict(self._seconds.get(step, {}))

    def truncate_after(self, step: int) -> None:
        """Remove the steps that a run resumed after `step` will repeat."""
        self._writer.truncate_after(step)

    def close(self) -> None:
        self._writer.close()

    def _now(self) -> float:
        return self._epoch + time.perf_counter()

    def _finish(self, span: Span) -> None:
        inside = self._inside_open_stages.pop()
        if self._inside_open_stages:
            self._inside_open_stages[-1] += span.seconds
        seconds = self._seconds.setdefault(span.step, {})
        seconds[span.stage] = seconds.get(span.stage, 0.0) + span.seconds - inside
        self._ended.setdefault(span.step, []).append(span)
        for by_step in (self._seconds, self._ended, self._waits):
            for old in sorted(by_step)[:-2]:
                del by_step[old]
        self._write(span)

    def _write(self, span: Span) -> None:
        self._writer.write(self._lines.span(span))


def read_timeline(folder: Path) -> TimelineRecords:
    """Read every rank's file of a timeline folder; missing files and broken lines are left out."""
    spans: list[Span] = []
    snapshots: list[MemorySnapshot] = []
    for lines in read_folder(folder):
        reader = LineReader()
        for line in lines:
            record = reader.record(line)
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
    events += [event for snapshot in records.snapshots for event in _memory_events(snapshot, origin)]
    write_atomic(Path(out), to_json({"displayTimeUnit": "ms", "traceEvents": events}))


def _stage_event(span: Span, origin: float) -> dict[str, Any]:
    arguments: dict[str, Any] = {"step": span.step} | ({"error": span.error} if span.error else {})
    for one in span.moved:
        values = {"bytes": one.num_bytes, "seconds": one.seconds, "gb_per_second": one.gb_per_second}
        arguments |= {f"{one.link}_{name}": value for name, value in values.items()}
    start, duration = (span.start - origin) * 1e6, span.seconds * 1e6
    return {"name": span.stage, "cat": "stage", "ph": "X", "pid": span.rank, "tid": int(span.background), "ts": start,
            "dur": duration, "args": arguments}  # fmt: skip


def _memory_events(snapshot: MemorySnapshot, origin: float) -> Iterator[dict[str, Any]]:
    """Yield counters of held memory and, if known, of the peaks since the previous boundary."""
    held, micros = snapshot.held, (snapshot.time - origin) * 1e6
    event = {"ph": "C", "pid": snapshot.rank, "ts": micros}
    yield event | {"name": "device memory", "args": held.device}
    if held.peaks:
        yield event | {"name": "device memory peak", "args": {**held.peaks, "all owners": held.peak}}
