"""Files of a timeline: a rank's open one, and earlier ones, closed and compressed.

rank_00003.0001.jsonl.gz  rank_00003.0002.jsonl.gz  rank_00003.jsonl
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from spmdrl.observability.jsonl import JsonlWriter, objects_of, read_jsonl, to_json, truncate_jsonl
from spmdrl.observability.outage import best_effort

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


def truncate_file(path: Path, step: int) -> None:
    """Drop every line whose step is above `step` from the files of a rank without a writer."""
    truncate_closed_parts(path, step)
    truncate_jsonl(path, step)


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
