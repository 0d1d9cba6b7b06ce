"""The runs below some folders with a row for each, read incrementally, in memory that doesn't grow with their steps."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from spmdrl.observability.alert_log import ALERTS_FILE
from spmdrl.observability.jsonl import read_jsonl
from spmdrl.observability.log import METRICS_FILE
from spmdrl.observability.report.config_diff import RESOLVED_CONFIG, differing, settings_of
from spmdrl.observability.report.run_files import GOOD_VERDICTS, is_run, text_of
from spmdrl.observability.summary import SUMMARY_FILE, read_summary
from spmdrl.observability.timeline import timeline_file
from spmdrl.runtime.supervision.holder import is_held

T = TypeVar("T")
Signature = tuple[int, int, int]
"""inode, size and time of change of a file; zeros if it is missing"""

MEASURES = ("reward", "preference/accuracy", "answer_probability", "loss")
"""metrics that a row may show; it shows the first one that the run has"""
MOST_POINTS = 96
_CHUNK_BYTES = 1 << 20
_DEEPEST = 3
_STALLED_SECONDS = 300.0
_STALLED_STEPS = 10


class RunIndex:
    """The runs in some folders, or in folders below them; a new run appears by itself."""

    def __init__(self, folders: Sequence[Path]):
        tops = {folder.resolve(): None for folder in folders}
        # The fewest last parts of the paths that differ for all of them: no two runs have one key.
        num_parts = next(n for n in itertools.count(1) if len({top.parts[-n:] for top in tops}) == len(tops))
        self._tops = {top: Path(*top.parts[-num_parts:]) for top in tops}
        self._rows: dict[str, _Row] = {}

    def folder_of(self, key: str) -> Path | None:
        """Return the folder of a run; None for anything but a key of a row."""
        row = self._rows.get(key)
        return None if row is None else row.folder

    def rows(self) -> dict[str, Any]:
        """Return all rows, and the settings in which they differ."""
        found = {self._key(top, folder): folder for top in self._tops for folder in _runs_below(top)}
        known, self._rows = self._rows, {}
        rows: list[dict[str, Any]] = []
        for key, folder in found.items():
            row = known.get(key) or _Row(folder)
            # It may be gone since, or not be this user's to read.
            with contextlib.suppress(OSError):
                rows.append({"key": key, "settings": row.settings.value} | row.cells())
                self._rows[key] = row
        settings = differing([row["settings"] for row in rows])
        names = [name for name in settings if not name.startswith(("run.", "resume"))]
        for at, row_cells in enumerate(rows):
            row_cells["settings"] = [settings[name][at] for name in names]
        return {"rows": rows, "settings": names, "now": time.time()}

    def _key(self, top: Path, folder: Path) -> str:
        below = folder.relative_to(top)
        return str(below if len(self._tops) == 1 and folder != top else self._tops[top] / below)


def _runs_below(top: Path) -> Iterator[Path]:
    """Yield the runs in a folder; links aren't followed, so that all of them are below it."""
    todo = [(top, 0)]
    while todo:
        folder, depth = todo.pop(0)
        try:
            found = is_run(folder)
            with os.scandir(folder) as entries:
                below = sorted(one.name for one in entries if one.is_dir(follow_symlinks=False) and one.name[0] != ".")
        except OSError:
            # It may be gone since, or not be this user's to read.
            continue
        if found:
            yield folder
        # Of a run's own folders only the warm start is a run.
        if depth < _DEEPEST:
            todo += [(folder / name, depth + 1) for name in below if not found or name == "warm_start"]


class _Row:
    """One run: files that are read again only if they changed, and a curve of bounded length."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.settings = Cached(folder / RESOLVED_CONFIG, lambda path: settings_of(text_of(path)))
        self._summary = Cached(folder / SUMMARY_FILE, lambda path: read_summary(path.parent))
        self._alerts = Cached(folder / ALERTS_FILE, lambda path: list(read_jsonl(path)))
        self._curve = Curve(folder / METRICS_FILE)

    def cells(self) -> dict[str, Any]:
        curve, alerts, summary = self._curve.read(), self._alerts.value, self._summary.value
        files = [self.folder / name for name in (METRICS_FILE, SUMMARY_FILE, ALERTS_FILE)]
        changed = max(signature_of(path)[2] for path in (*files, timeline_file(self.folder, 0)))
        state = state_of(self.folder, summary, changed / 1e9, curve.seconds)
        return {
            "state": state, "verdict": str(summary.get("verdict") or ""), "step": curve.step,
            "measure": curve.measure, "last": curve.last, "curve": curve.points, "changed": changed / 1e9,
            "verb": str(summary.get("verb") or ""), "alerts": len(alerts), "alert": alerts[-1] if alerts else None,
        }  # fmt: skip


def state_of(folder: Path, summary: dict[str, Any], changed: float, step_seconds: float) -> str:
    """Return running, stalled, done, stopped or failed.

    A run stalls if its folder is held and its files haven't changed for minutes and several times the last step.
    """
    if is_held(folder):
        is_late = time.time() - changed > max(_STALLED_SECONDS, _STALLED_STEPS * step_seconds)
        return "stalled" if is_late else "running"
    verdict = str(summary.get("verdict") or "")
    if verdict in ("stopped", "interrupted"):
        return "stopped"
    return "done" if verdict in GOOD_VERDICTS else "failed"


class Curve:
    """The measure of a run over its steps, from the lines that were appended since the last look.

    Beyond `MOST_POINTS` neighbouring points become their mean, so that its size is bounded.
    """

    def __init__(self, path: Path):
        self._path = path
        self._start_anew(0)

    def _start_anew(self, inode: int) -> None:
        self._inode, self._offset = inode, 0
        self.step, self.seconds = 0, 0.0
        self.measure = ""
        self.last: float | None = None
        self._sums: list[tuple[float, int]] = []
        self._stride = 1

    @property
    def points(self) -> list[float]:
        return [float(f"{total / count:.4g}") for total, count in self._sums]

    def read(self) -> Curve:
        """Read what is new; a file that was replaced or cut, as by a resumed run, is read from its beginning."""
        inode, size, _ = signature_of(self._path)
        if inode != self._inode or size < self._offset:
            self._start_anew(inode)
        if size > self._offset:
            whole = measured = b""
            with self._path.open("rb", buffering=_CHUNK_BYTES) as file:
                file.seek(self._offset)
                for line in file:
                    if line[-1:] != b"\n":
                        break  # it is being written
                    self._offset += len(line)
                    whole = line
                    if self._add(line):
                        measured = line
            self.step = int(_number_of(whole, "step") or self.step)
            self.seconds = _number_of(measured, "time/step") or self.seconds
        return self

    def _add(self, line: bytes) -> bool:
        """Take one number from a line, if it has it: to parse all of it takes ten times as long."""
        for name in (self.measure,) if self.measure else MEASURES:
            value = _number_of(line, name)
            if value is not None:
                self.measure, self.last = name, value
                self._append(value)
                return True
        return False

    def _append(self, value: float) -> None:
        if self._sums and self._sums[-1][1] < self._stride:
            total, count = self._sums[-1]
            self._sums[-1] = (total + value, count + 1)
        else:
            self._sums.append((value, 1))
        if len(self._sums) > MOST_POINTS:
            pairs = zip(self._sums[::2], [*self._sums[1::2], (0.0, 0)], strict=False)
            self._sums = [(left + right, count + more) for (left, count), (right, more) in pairs]
            self._stride *= 2


def _number_of(line: bytes, name: str) -> float | None:
    """Return a number of a line that `JsonlWriter` wrote; from its end, where the names that are looked for stand."""
    key = b'"%b": ' % name.encode()
    start = line.rfind(key)
    if start < 0:
        return None
    start += len(key)
    end = line.find(b",", start)
    try:
        return float(line[start:end] if end >= 0 else line[start:].strip(b"} \n"))
    except ValueError:
        return None


class Cached(Generic[T]):
    """Content of a file, read again only if the file has changed."""

    def __init__(self, path: Path, read: Callable[[Path], T]):
        self._path, self._read = path, read
        self._signature: Signature | None = None
        self._value: T | None = None

    @property
    def value(self) -> T:
        signature = signature_of(self._path)
        if self._value is None or signature != self._signature:
            self._value, self._signature = self._read(self._path), signature
        return self._value


def signature_of(path: Path) -> Signature:
    """Return what changes with a file's content."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0, 0
    return found.st_ino, found.st_size, found.st_mtime_ns
