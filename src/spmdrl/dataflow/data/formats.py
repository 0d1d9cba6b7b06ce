"""Raw rows from data files: JSON lines, JSON arrays, CSV and parquet, plain or gzipped.

Until rows are kept, memory is bounded by the longest allowed row.
"""

from __future__ import annotations

import csv
import glob
import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from spmdrl.dataflow.data.json_array import array_values, repeated_key

MOST_ROW_BYTES = 16 << 20
_CHUNK_BYTES = 1 << 20
# Text packs to a twentieth of its size; a file that packs far better holds nothing but repetitions.
_MOST_GROWTH = 100
_GROWTH_FROM_BYTES = 4 << 20
_ROWS_AT_ONCE = 1024
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
NAMES = ".jsonl, .json, .csv, .tsv (each also with .gz) and .parquet"


@dataclass(frozen=True)
class BadRow:
    """An unusable row: its place (file:line, with :column if known), a short kind, and the problem."""

    place: str
    kind: str
    problem: str

    def __str__(self) -> str:
        return f"{self.place}: {self.problem} [{self.kind}]"


class Flaw(ValueError):
    """Defect of a row: a short kind, and the problem as text."""

    def __init__(self, kind: str, problem: str):
        super().__init__(problem)
        self.kind = kind


@dataclass(frozen=True)
class Record:
    """One raw row of a file."""

    place: str
    values: dict[str, Any]
    file: str


Rows = Iterator[Record | BadRow]


def suffix_of(file: Path) -> str | None:
    """Return the format of a file by its name, or None if it isn't supported."""
    name = file.name.lower()
    suffix = Path(name.removesuffix(".gz")).suffix
    is_read = suffix in SUFFIXES and not (suffix == ".parquet" and name.endswith(".gz"))
    return suffix if is_read else None


def read_file(path: str, file: Path) -> Rows:
    """Return the rows of one file, in order, named after `path`. Raises ValueError if the file is truncated or not in
    its name's format."""
    suffix = suffix_of(file)
    if suffix == ".parquet":
        return _read_parquet(path, file)
    if suffix in (".csv", ".tsv"):
        return _read_csv(path, _chunks(path, file), "\t" if suffix == ".tsv" else ",")
    return _read_json(path, _chunks(path, file))


def _chunks(path: str, file: Path) -> Iterator[bytes]:
    is_packed = file.suffix.lower() == ".gz"
    num_bytes = 0
    try:
        with file.open("rb") as packed, gzip.GzipFile(fileobj=packed) if is_packed else packed as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                num_bytes += len(chunk)
                if is_packed and num_bytes > max(_GROWTH_FROM_BYTES, _MOST_GROWTH * packed.tell()):
                    raise ValueError(
                        f"data file {path} unpacks to more than {_MOST_GROWTH} times its size, which no data does; "
                        "unpack it yourself if it is right"
                    )
                yield chunk
    except (OSError, EOFError, zlib.error) as error:
        advice = "; it is no whole gzip file, copy it again" if is_packed else ""
        raise ValueError(f"data file {path} can't be read: {error}{advice}") from error


def _lines(chunks: Iterator[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """Yield lines with their numbers; None for a line longer than a row may be."""
    number, pending, num_bytes = 1, list[bytes](), 0
    for chunk in chunks:
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            is_whole = num_bytes + len(end) <= MOST_ROW_BYTES
            yield number, b"".join((*pending, end)) if is_whole else None
            number, pending, num_bytes = number + 1, [], 0
        num_bytes += len(rest)
        # The rest of a line that is already too long isn't kept.
        pending = [*pending, rest] if num_bytes <= MOST_ROW_BYTES else []
    if num_bytes:
        yield number, b"".join(pending) if num_bytes <= MOST_ROW_BYTES else None


def _read_json(path: str, chunks: Iterator[bytes]) -> Rows:
    """Yield objects, one per line or in one array; the first character decides."""
    first = next(chunks, b"").removeprefix(_BYTE_ORDER_MARK)
    whole = chain([first], chunks)
    return _array_rows(path, whole) if first.lstrip()[:1] == b"[" else _line_rows(path, whole)


def _line_rows(path: str, chunks: Iterator[bytes]) -> Rows:
    for number, line in _lines(chunks):
        place = f"{path}:{number}"
        if line is None:
            yield BadRow(place, "too_long", f"a line of more than {MOST_ROW_BYTES >> 20} MiB")
        elif line.strip():
            yield _parse_line(path, place, line)


def _parse_line(path: str, place: str, line: bytes) -> Record | BadRow:
    try:
        value = json.loads(line.decode(), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        return BadRow(f"{place}:{error.start + 1}", "invalid_utf8", f"byte 0x{line[error.start]:02x} isn't UTF-8")
    except json.JSONDecodeError as error:
        return BadRow(f"{place}:{error.colno}", "not_json", f"not JSON: {error.msg}; JSONL has one object per line")
    except RecursionError:
        return BadRow(place, "not_json", "nested too deeply")
    except Flaw as flaw:
        return BadRow(place, flaw.kind, str(flaw))
    except ValueError as error:
        return BadRow(place, "not_json", str(error))
    return _record(path, place, value, "JSONL has one object per line")


def _record(path: str, place: str, value: Any, rule: str) -> Record | BadRow:
    if isinstance(value, dict):
        return Record(place, value, path)
    return BadRow(place, "not_object", f"a {type(value).__name__}, but {rule}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if (twice := repeated_key(pairs)) is not None:
        raise Flaw("duplicate_key", f"the key '{twice}' stands twice")
    return dict(pairs)


def _array_rows(path: str, chunks: Iterator[bytes]) -> Rows:
    for place, value, twice in array_values(path, chunks, MOST_ROW_BYTES):
        if twice is not None:
            yield BadRow(place, "duplicate_key", f"the key '{twice}' stands twice")
        else:
            yield _record(path, place, value, "the array has one object per row")


def _read_csv(path: str, chunks: Iterator[bytes], delimiter: str) -> Rows:
    csv.field_size_limit(MOST_ROW_BYTES)
    rows = csv.reader(_csv_lines(path, chunks), delimiter=delimiter, strict=True)
    try:
        header = next(rows, [])
        twice = [name for name in header if header.count(name) > 1]
        if twice:
            raise ValueError(f"{path}:1: the header names {twice[0]!r} twice; give each column its own name")
        while True:
            place = f"{path}:{rows.line_num + 1}"
            cells = next(rows, None)
            if cells is None:
                return
            if len(cells) > len(header) or 0 < len(cells) < len(header):
                yield BadRow(place, "cells", f"{len(cells)} cells, but the header has {len(header)} columns")
            elif cells:
                yield Record(place, dict(zip(header, cells, strict=True)), path)
    except csv.Error as error:
        raise ValueError(f"{path}:{rows.line_num}: not CSV: {error}; look for a quote that isn't closed") from error


def _csv_lines(path: str, chunks: Iterator[bytes]) -> Iterator[str]:
    for number, line in _lines(chunks):
        if line is None:
            raise ValueError(f"{path}:{number}: a line of more than {MOST_ROW_BYTES >> 20} MiB")
        try:
            yield (line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line).decode() + "\n"
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}:{number}:{error.start + 1}: byte 0x{line[error.start]:02x} isn't UTF-8; save the file as UTF-8"
            ) from error


def _read_parquet(path: str, file: Path) -> Rows:
    # Imported here because only parquet needs it.
    import duckdb

    number = 0
    try:
        # Without threads of its own, and without columns made of the names of folders.
        with duckdb.connect(config={"threads": 1}) as database:
            query = "select * from read_parquet(?, hive_partitioning = false)"
            found = database.execute(query, [glob.escape(str(file))])
            names = [column[0] for column in found.description]
            while rows := found.fetchmany(_ROWS_AT_ONCE):
                for values in rows:
                    number += 1
                    yield Record(f"{path}:{number}", dict(zip(names, values, strict=True)), path)
    except duckdb.Error as error:
        words = str(error).splitlines()[0]
        raise ValueError(
            f"data file {path} can't be read: {words}; it is no whole parquet file, copy it again"
        ) from error
