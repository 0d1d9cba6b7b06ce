"""Raw records out of data files: JSONL, parquet and rows made by code, each with the place that it came from."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl.dataflow.samples.synthetic import SCHEME, synthetic_rows

_NUM_SHOWN = 20


@dataclass(frozen=True)
class BadRow:
    """A row that can't be used: where it is (file:line, with :column where known), a short kind, and what is wrong."""

    place: str
    kind: str
    problem: str

    def __str__(self) -> str:
        return f"{self.place}: {self.problem} [{self.kind}]"


class BadRows(ValueError):
    """Rows that can't be used, all of them in `rows`; the message shows the first few."""

    def __init__(self, rows: list[BadRow], num_rows: int):
        self.rows = tuple(rows)
        shown = "\n  ".join(str(row) for row in rows[:_NUM_SHOWN])
        more = f"\n  ... and {len(rows) - _NUM_SHOWN} more" if len(rows) > _NUM_SHOWN else ""
        super().__init__(
            f"{len(rows)} of {num_rows} rows can't be used:\n  {shown}{more}\n"
            "mend them, or set data.on_bad_row: skip to leave them out"
        )


@dataclass(frozen=True)
class Record:
    """One row as its file holds it."""

    place: str
    values: dict[str, Any]


def read_records(path: str) -> Iterator[Record | BadRow]:
    """The rows of a JSONL or parquet file or a `synthetic://` URL, in order; what isn't an object comes as a BadRow."""
    if path.startswith(SCHEME):
        return (Record(f"{path}:{number}", row) for number, row in enumerate(synthetic_rows(path), 1))
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(_no_such_file(file))
    if file.suffix == ".parquet":
        return _read_parquet(path, file)
    if file.suffix in (".jsonl", ".json", ".ndjson"):
        return _read_jsonl(path, file)
    raise ValueError(
        f"data file {path} ends in '{file.suffix}', but only .jsonl and .parquet are read; convert it first"
    )


def _no_such_file(file: Path) -> str:
    if file.is_dir():
        inside = sorted(child.name for child in file.iterdir() if child.suffix in (".jsonl", ".parquet"))
        return f"data path {file} is a folder; name the files in it: {', '.join(inside) or '(it holds no data file)'}"
    siblings = [child.name for child in file.parent.iterdir()] if file.parent.is_dir() else []
    close = difflib.get_close_matches(file.name, siblings, n=1)
    hint = f"did you mean {file.parent / close[0]}?" if close else "data is read from local files and synthetic:// URLs"
    return f"there is no data file {file}; {hint}"


def _read_jsonl(path: str, file: Path) -> Iterator[Record | BadRow]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            place = f"{path}:{number}"
            if line.strip():
                yield _parse_line(place, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)


def _parse_line(place: str, line: bytes) -> Record | BadRow:
    try:
        value = json.loads(line.decode(), object_pairs_hook=_object_without_duplicates)
    except UnicodeDecodeError as error:
        return BadRow(f"{place}:{error.start + 1}", "invalid_utf8", f"byte 0x{line[error.start]:02x} isn't UTF-8")
    except json.JSONDecodeError as error:
        return BadRow(f"{place}:{error.colno}", "not_json", f"not JSON: {error.msg}; JSONL has one object a line")
    except RecursionError:
        return BadRow(place, "not_json", "nested too deeply")
    except _DuplicateKey as error:
        return BadRow(place, "duplicate_key", f"the key '{error}' stands twice")
    except ValueError as error:
        return BadRow(place, "not_json", str(error))
    if not isinstance(value, dict):
        return BadRow(place, "not_object", f"a {type(value).__name__}, but JSONL has one object a line")
    return Record(place, value)


class _DuplicateKey(Exception):
    pass


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _DuplicateKey(next(key for key in keys if keys.count(key) > 1))
    return values


def _read_parquet(path: str, file: Path) -> Iterator[Record | BadRow]:
    try:
        import pyarrow.parquet  # type: ignore[import-not-found]  # an optional back end
    except ImportError as error:
        raise ValueError(
            f"reading {path} needs pyarrow; `pip install -e '.[parquet]'` in the clone, or convert it to JSONL"
        ) from error
    number = 0
    for batch in pyarrow.parquet.ParquetFile(file).iter_batches():
        for values in batch.to_pylist():
            number += 1
            yield Record(f"{path}:{number}", values)
