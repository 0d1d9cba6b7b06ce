"""Timeline of each rank's stages, moved bytes and held memory: files by rank, and a Perfetto trace.

A rank has an open file, and earlier ones, closed and compressed:

    rank_00003.0001.jsonl.gz  rank_00003.0002.jsonl.gz  rank_00003.jsonl
"""

from __future__ import annotations

import gzip
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl.observability.jsonl import JsonlWriter, objects_of, read_jsonl, to_json, truncate_jsonl, write_atomic
from spmdrl.observability.outage import best_effort
from spmdrl.observability.timeline_lines import HeldMemory, LineReader, LineWriter, MemorySnapshot, Moved, Span
from spmdrl.runtime.supervision.activity import activity

PART_BYTES = 1 << 20


class PartedWriter:
    """Writer of JSON lines to an open file, which is closed and compressed once it is large."""

    def __init__(self, path: Path, header: Mapping[str, Any], *, part_bytes: int = PART_BYTES):
        """`header` is this process's first line in each file."""
        self._path = path
        self._header = header
        self._part_bytes = part_bytes
        self._last_step = -1
        self._writer = self._opened()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one object; a new file begins with a new step, since a step's lines belong together."""
        step = record["step"]
        # Buffered lines belong in the open file.
        if step > self._last_step and self._writer.num_waiting == 0:
            with best_effort("a closed part of the timeline"):
                if self._path.stat().st_size > self._part_bytes:
                    self._close_part()
        self._last_step = max(step, self._last_step)
        self._writer.write(record)

    def truncate_after(self, step: int) -> None:
        """Drop every line whose step is above `step`."""
        truncate_closed_parts(self._path, step)
        self._writer.truncate_after(step)

    def close(self) -> None:
        self._writer.close()

    def _opened(self) -> JsonlWriter:
        writer = JsonlWriter(self._path)
        writer.write(self._header)
        return writer

    def _close_part(self) -> None:
        """Close the open file; renaming comes first, so that each line is always in one place."""
        number = 1 + max((int(part.name.split(".")[1]) for part in closed_parts(self._path)), default=0)
        plain = self._path.with_name(f"{self._path.stem}.{number:04d}.jsonl")
        before = self._writer
        self._path.rename(plain)
        self._writer = self._opened()
        before.close()
        _write_part(plain.with_name(plain.name + ".gz"), read_jsonl(plain))
        plain.unlink()


def closed_parts(path: Path) -> list[Path]:
    """Return the closed files before the open one at `path`, in order, each once."""
    found = {part.name.removesuffix(".gz"): part for part in sorted(path.parent.glob(f"{path.stem}.*.jsonl*"))
             if part.name.endswith((".jsonl", ".jsonl.gz")) and part.name.split(".")[1].isdigit()}  # fmt: skip
    return [found[name] for name in sorted(found)]


def truncate_closed_parts(path: Path, step: int) -> None:
    """Drop every line whose step is above `step` from the closed files before the open one at `path`."""
    for part in reversed(closed_parts(path)):
        lines = list(read_part(part))
        kept = [line for line in lines if isinstance(line.get("step"), int) and line["step"] <= step]
        if len(kept) == len(lines):
            break
        if any(line["step"] >= 0 for line in kept):
            _write_part(part, kept)
        else:
            part.unlink()


def read_folder(folder: Path) -> Iterator[Iterator[dict[str, Any]]]:
    """Return the lines of each rank's files in order; missing files, broken lines and parts are left out."""
    names = {part.name.split(".")[0] for part in folder.glob("[!.]*.jsonl*")}
    for path in (folder / f"{name}.jsonl" for name in sorted(names)):
        for part in closed_parts(path):
            yield read_part(part)
        yield read_jsonl(path)


def read_part(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a closed file, as far as it can be read."""
    if path.suffix != ".gz":
        yield from read_jsonl(path)
        return
    try:
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as lines:
            yield from objects_of(lines)
    except (OSError, EOFError, zlib.error):
        return


def _write_part(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Write a closed file, compressed if its name ends in .gz; readers see the old content or the new one."""
    aside, opened = path.with_name(f".{path.name}.tmp"), gzip.open if path.suffix == ".gz" else open
    with opened(aside, "wt", encoding="utf-8") as file:
        file.writelines(to_json(line) + "\n" for line in lines)
    os.replace(aside, path)


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
            truncate_closed_parts(path, step)
            truncate_jsonl(path, step)


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
        self.num_kept_steps = 2
        """Newest steps whose stages are remembered."""
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
        """Return this rank's waits in `step` by stage; only the newest steps are kept."""
        return dict(self._waits.get(step, {}))

    def memory(self, step: int, held: HeldMemory) -> None:
        """Write this rank's held memory at the end of a stage of `step`."""
        self.held = held
        self._writer.write(self._lines.memory(step, self._now(), held))

    def stage_seconds(self, step: int) -> dict[str, float]:
        """Return this rank's own seconds by stage in `step`, without inner stages; the newest steps only."""
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
            for old in sorted(by_step)[: -self.num_kept_steps]:
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
