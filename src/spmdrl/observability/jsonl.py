"""JSON Lines files that survive a crash: whole lines, flushed one by one, broken ones skipped on reading."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonlWriter:
    """Appends JSON objects to a file, one flushed line each."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._open()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one object; keys are sorted, floats round-trip exactly, NaN and infinities become strings."""
        self._file.write(to_json(record) + "\n")
        self._file.flush()

    def truncate_after(self, step: int) -> None:
        """Drop every line whose `step` is above `step`, and any broken line; the change is atomic."""
        self._file.close()
        kept = [to_json(record) for record in read_jsonl(self.path) if _step_of(record) <= step]
        write_atomic(self.path, "".join(line + "\n" for line in kept))
        self._open()

    def close(self) -> None:
        self._file.close()

    def _open(self) -> None:
        self._file = self.path.open("a", encoding="utf-8")
        # A crash may have cut the last line; the next record must not be glued to it.
        if not _ends_with_newline(self.path):
            self._file.write("\n")


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file in order; a missing file is empty and a broken line is skipped."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                yield record


def write_atomic(path: Path, text: str) -> None:
    """Write a text file so that a reader finds either the old content or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    # Text of a policy may hold lone surrogates, which UTF-8 has no bytes for.
    with aside.open("w", encoding="utf-8", errors="replace", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON with sorted keys; non-finite floats become the strings "NaN", "Infinity", "-Infinity"."""
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False, indent=indent)
    except ValueError:
        return json.dumps(_finite_or_text(value), sort_keys=True, allow_nan=False, indent=indent)


def number(value: Any) -> float | None:
    """The float that a JSON value stands for, reading back what `to_json` wrote; None where it isn't a number."""
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
