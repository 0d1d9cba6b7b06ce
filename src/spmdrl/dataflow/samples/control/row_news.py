"""News of rows that ranks exchange, as int64 words that any collective and any journal can carry.

A message is a word of its kind and number of rows, then what its kind holds. Integers of a message (row numbers,
homes, lengths) take as little room as their spread allows: equal ones one word, consecutive ones a word a run, others
1, 2, 4 or 8 bytes each.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from spmdrl.dataflow.samples.schema import RULES, length_column, names_of_mask, rule_of
from spmdrl.dataflow.samples.store.shared_memory import Place
from spmdrl.types import Integers


@dataclass(frozen=True)
class RowMetadata:
    """News of rows: where they live, which columns they got, and how long the ragged ones are.

    rows [B], homes [B] (warehouse numbers), columns is a mask of schema bits, lengths maps each ragged column
    whose lengths aren't those of another column to int64 [B].
    """

    rows: Integers
    homes: Integers
    columns: int
    lengths: Mapping[str, Integers]


@dataclass(frozen=True)
class RowDrop:
    """News of rows that won't be trained on, and why."""

    rows: Integers
    reason: str


@dataclass(frozen=True)
class Stored:
    """News inside a node: columns of rows lie in the frame at `place`, row `rows[i]` at position `positions[i]`.

    Without positions, rows lie in the order in which they are named.
    """

    rows: Integers
    columns: int
    place: Place
    positions: Integers | None = None


News = RowMetadata | RowDrop | Stored

_METADATA, _DROP, _STORED = 1, 2, 3
_BITS_OF_KIND = 8
_ALL_COLUMNS = (1 << len(RULES)) - 1
# A row gets each column once and is stored once a column; what is left is for drops.
_MOST_NEWS_OF_A_ROW = 4 * len(RULES)


def pack_news(news: Iterable[News]) -> Integers:
    """Any number of news as one array of words, a message each; `joined` news take the least room."""
    parts: list[Integers] = [np.empty(0, dtype=np.int64)]
    for entry in news:
        if isinstance(entry, RowMetadata):
            lengths = [entry.lengths[name] for name in announced_lengths(entry.columns)]
            parts += [_words(_head(_METADATA, entry.rows), entry.columns)]
            parts += [pack_integers(values) for values in (entry.rows, entry.homes, *lengths)]
        elif isinstance(entry, RowDrop):
            reason = np.frombuffer(entry.reason.encode(), dtype=np.uint8).astype(np.int64)
            parts += [_words(_head(_DROP, entry.rows), reason.size)]
            parts += [pack_integers(entry.rows), pack_integers(reason)]
        else:
            in_order = entry.positions is None
            parts += [_words(_head(_STORED, entry.rows), entry.columns, *entry.place, in_order)]
            parts += [pack_integers(values) for values in (entry.rows, entry.positions) if values is not None]
    return np.concatenate(parts)


def unpack_news(packed: Integers, num_rows: int) -> list[News]:
    """What `pack_news` packed about a batch of `num_rows` rows. Raises ValueError for words that it never writes."""
    reader = _Reader(packed, num_rows)
    news: list[News] = []
    while not reader.is_at_end:
        news.append(_read_entry(reader))
    return news


def joined(news: Iterable[News]) -> list[News]:
    """The same news in as few entries as possible: metadata of the same columns, and drops for the same reason."""
    alike: dict[tuple[object, ...], list[News]] = {}
    for entry in news:
        key: tuple[object, ...] = (Stored, id(entry))
        if isinstance(entry, RowMetadata):
            key = (RowMetadata, entry.columns)
        elif isinstance(entry, RowDrop):
            key = (RowDrop, entry.reason)
        alike.setdefault(key, []).append(entry)
    return [entries[0] if len(entries) == 1 else _join(entries) for entries in alike.values()]


@functools.lru_cache
def announced_lengths(columns: int) -> tuple[str, ...]:
    """The columns of this mask whose row lengths travel in metadata, in schema order."""
    ragged = [name for name in names_of_mask(columns) if rule_of(name).column.ragged]
    return tuple(name for name in ragged if length_column(name) == name)


def _join(entries: list[News]) -> News:
    rows = np.concatenate([entry.rows for entry in entries])
    if isinstance(entries[0], RowDrop):
        # A row may be dropped again before others read of it.
        return RowDrop(np.unique(rows), entries[0].reason)
    metadata = [entry for entry in entries if isinstance(entry, RowMetadata)]
    columns = metadata[0].columns
    lengths = {name: np.concatenate([entry.lengths[name] for entry in metadata]) for name in announced_lengths(columns)}
    return RowMetadata(rows, np.concatenate([entry.homes for entry in metadata]), columns, lengths)


def _words(*values: int) -> Integers:
    return np.array(values, dtype=np.int64)


def _head(kind: int, rows: Integers) -> int:
    return kind | rows.size << _BITS_OF_KIND


# Integers: a word of code and base, then words. Code 0..8: base + unsigned values of that many bytes. Code _RUNS: base
# runs of consecutive integers, each a word of its first integer and its length.
_RUNS = 9
_BITS_OF_CODE = 8
_BITS_OF_RUN = 32
_BYTES_FOR = (0, 1, 2, 4, 4, 8, 8, 8, 8)
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def pack_integers(values: Integers) -> Integers:
    """Integers below 2^31 in size, in whichever form is shortest."""
    if not values.size:
        return _words(0)
    if values[-1] - values[0] == values.size - 1 and (values[1:] > values[:-1]).all():
        run = int(values[0]) << _BITS_OF_RUN | values.size
        return _words(_RUNS | 1 << _BITS_OF_CODE, run)
    low = int(values.min())
    width = _BYTES_FOR[((int(values.max()) - low).bit_length() + 7) // 8]
    num_words = -(-values.size * width // 8)
    begins = np.flatnonzero(np.diff(values) != 1) + 1
    if begins.size + 1 < num_words:
        bounds = np.concatenate([[0], begins, [values.size]])
        runs = values[bounds[:-1]] << _BITS_OF_RUN | np.diff(bounds)
        return np.concatenate([_words(_RUNS | runs.size << _BITS_OF_CODE), runs])
    out = np.zeros(1 + num_words, dtype=np.int64)
    out[0] = width | low << _BITS_OF_CODE
    if width:
        out[1:].view(_UNSIGNED[width])[: values.size] = values - low
    return out


class _Reader:
    """Reads words from front to back, and never makes more out of them than a batch of `num_rows` rows can need."""

    def __init__(self, packed: Integers, num_rows: int):
        self.num_rows = num_rows
        self._packed = np.ascontiguousarray(packed, dtype=np.int64)
        self._at = 0
        self._most = num_rows * _MOST_NEWS_OF_A_ROW

    @property
    def is_at_end(self) -> bool:
        return self._at == self._packed.size

    def words(self, count: int) -> Integers:
        start, self._at = self._at, self._at + count
        if not 0 <= count <= self._packed.size - start:
            raise ValueError(f"metadata ends at word {self._packed.size}, but {count} are due at word {start}")
        return self._packed[start : self._at]

    def word(self) -> int:
        return int(self.words(1)[0])

    def claim(self, count: int) -> int:
        """`count`, if news of so many rows can be true."""
        self._most -= count
        if not 0 <= count <= self.num_rows or self._most < 0:
            raise ValueError(f"metadata announces {count} rows at once, or too often, for a batch of {self.num_rows}")
        return count

    def integers(self, count: int) -> Integers:
        head = self.word()
        code, base = head & (1 << _BITS_OF_CODE) - 1, head >> _BITS_OF_CODE
        if code == _RUNS:
            return self._runs(base, count)
        if code == 0:
            return np.full(count, base, dtype=np.int64)
        if code not in _UNSIGNED:
            raise ValueError(f"metadata holds integers of {code} bytes; do all ranks run the same version?")
        values = self.words(-(-count * code // 8)).view(_UNSIGNED[code])[:count]
        return values.astype(np.int64) + base

    def _runs(self, num_runs: int, count: int) -> Integers:
        runs = self.words(num_runs)
        firsts, sizes = runs >> _BITS_OF_RUN, runs & (1 << _BITS_OF_RUN) - 1
        if not num_runs or sizes.min() < 1 or sizes.sum() != count:
            raise ValueError(f"metadata holds {num_runs} runs that don't make up {count} integers")
        if num_runs == 1:
            return np.arange(firsts[0], firsts[0] + count)
        return np.repeat(firsts - (np.cumsum(sizes) - sizes), sizes) + np.arange(count)


def _read_entry(reader: _Reader) -> News:
    head = reader.word()
    kind, count = head & (1 << _BITS_OF_KIND) - 1, reader.claim(head >> _BITS_OF_KIND)
    if kind == _METADATA:
        columns = _checked_columns(reader.word())
        rows, homes = reader.integers(count), reader.integers(count)
        return RowMetadata(rows, homes, columns, {name: reader.integers(count) for name in announced_lengths(columns)})
    if kind == _DROP:
        num_bytes = reader.word()
        rows = reader.integers(count)
        return RowDrop(rows, _read_text(reader, num_bytes))
    if kind == _STORED:
        columns = _checked_columns(reader.word())
        place = Place(reader.word(), reader.word(), reader.word())
        in_order = reader.word()
        rows = reader.integers(count)
        return Stored(rows, columns, place, None if in_order else reader.integers(count))
    raise ValueError(f"metadata of unknown kind {kind}; do all ranks run the same version?")


_LONGEST_REASON_BYTES = 1 << 12


def _read_text(reader: _Reader, num_bytes: int) -> str:
    if not 0 <= num_bytes <= _LONGEST_REASON_BYTES:
        raise ValueError(f"metadata holds a reason of {num_bytes} bytes; at most {_LONGEST_REASON_BYTES} are allowed")
    return reader.integers(num_bytes).astype(np.uint8).tobytes().decode()


def _checked_columns(columns: int) -> int:
    if columns & ~_ALL_COLUMNS:
        raise ValueError(f"metadata names columns {columns:#x}, but the schema has {len(RULES)}; same version?")
    return columns
