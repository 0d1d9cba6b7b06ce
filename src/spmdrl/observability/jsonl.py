"""JSON Lines files that survive a crash and a full disk: lines are written whole, and broken ones skipped."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from spmdrl.observability.outage import count_refused, warn

_MAX_WAITING_BYTES = 1 << 24
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonlWriter:
    """Writer that appends JSON objects to a file, each as a whole line or not at all.

    Lines that a full or failing disk refuses are buffered and written, in order, once it works; beyond
    `_MAX_WAITING_BYTES` the oldest are lost. Each gives one warning per outage, and neither raises.
    """

    def __init__(self, path: Path):
        self.path = path
        self.num_lost = 0
        """number of lines that were never written"""
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._is_out = False
        path.parent.mkdir(parents=True, exist_ok=True)
        self._open()

    @property
    def num_waiting(self) -> int:
        """Number of buffered lines."""
        return len(self._waiting)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one object; keys are sorted, floats round-trip exactly, NaN and infinities become strings."""
        self._wait((to_json(record) + "\n").encode())
        self._flush()

    def truncate_after(self, step: int) -> None:
        """Call `truncate_jsonl`, before anything is logged."""
        truncate_jsonl(self.path, step)
        os.close(self._descriptor)
        self._open()

    def close(self) -> None:
        self._flush()
        if self._waiting:
            self.num_lost += len(self._waiting)
            warn(f"{self.path} is closed without its last {len(self._waiting)} lines, which the disk never took")
        os.close(self._descriptor)

    def _wait(self, line: bytes) -> None:
        self._waiting.append(line)
        self._waiting_bytes += len(line)
        while self._waiting_bytes > _MAX_WAITING_BYTES and len(self._waiting) > 1:
            self._waiting_bytes -= len(self._waiting.popleft())
            self.num_lost += 1

    def _flush(self) -> None:
        try:
            self._append(b"".join(self._waiting))
        except OSError as failure:
            count_refused()
            if not self._is_out:
                warn(f"{self.path} can't be written ({failure}); the run goes on, and its lines wait in memory")
            self._is_out = True
            return
        if self._is_out:
            lost = f"; {self.num_lost} lines are lost" if self.num_lost else ", and nothing is lost"
            warn(f"{self.path} is written again, {len(self._waiting)} lines that waited among it{lost}")
        self._is_out = False
        self._waiting.clear()
        self._waiting_bytes = 0

    def _append(self, content: bytes) -> None:
        """Append all of it, or raise OSError and append nothing."""
        before = os.fstat(self._descriptor).st_size
        try:
            while content:
                content = content[os.write(self._descriptor, content) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, before)
            raise

    def _open(self) -> None:
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        # A crash may have cut the last line; the next record must start a new one.
        if not _ends_with_newline(self.path):
            self._wait(b"\n")


def truncate_jsonl(path: Path, step: int) -> None:
    """Drop every line whose `step` is above `step`, and any broken line; the change is atomic.

    The file is replaced: lines that a job without the folder appends to the old one are lost with it. Raises OSError if
    the disk fails.
    """
    kept = [to_json(record) for record in read_jsonl(path) if _step_of(record) <= step]
    write_atomic(path, "".join(line + "\n" for line in kept))


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file in order; a missing file is empty and a broken line is skipped."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        yield from objects_of(lines)


def read_object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file, or an empty one if the file is missing or broken."""
    try:
        content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def objects_of(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects among lines of JSON; a broken line is skipped."""
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record


def write_atomic(path: Path, text: str, *, aside: Path | None = None) -> None:
    """Write a text file so that readers see either the old content or the new one, never a part.

    It replaces `aside` on the disk, if that exists.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = aside or path.with_name(f".{path.name}.{os.getpid()}.tmp")
    # A policy's text may have lone surrogates, which UTF-8 can't encode.
    try:
        with aside.open("r+" if aside.exists() else "w", encoding="utf-8", errors="replace", newline="\n") as file:
            file.write(text)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Encode as strict JSON with sorted keys; non-finite floats become the strings "NaN", "Infinity", "-Infinity"."""
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False, indent=indent)
    except ValueError:
        return json.dumps(_finite_or_text(value), sort_keys=True, allow_nan=False, indent=indent)


def number(value: Any) -> float | None:
    """Return the float of a JSON value written by `to_json`; None if it isn't a number."""
    if isinstance(value, str):
        return NON_FINITE.get(value)
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:
            return None
    return None


def _finite_or_text(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {key: _finite_or_text(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite_or_text(inner) for inner in value]
    return value


def _step_of(record: Mapping[str, Any]) -> float:
    step = number(record.get("step"))
    return math.inf if step is None or math.isnan(step) else step


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
