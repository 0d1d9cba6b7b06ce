"""Metadata of rows: what ranks tell each other's controllers, as int64 arrays that any collective can carry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spmdrl.dataflow.samples.schema import length_column, names_of_mask, rule_of

Integers = NDArray[np.int64]

_COLUMNS, _DROP = 0, 1


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

    def pack(self) -> Integers:
        """One int64 array: number of rows, mask, rows, homes, then lengths in schema order."""
        lengths = [self.lengths[name] for name in announced_lengths(self.columns)]
        head = np.array([self.rows.size, self.columns], dtype=np.int64)
        return np.concatenate([head, self.rows, self.homes, *lengths])

    @staticmethod
    def unpack(packed: Integers) -> tuple[RowMetadata, Integers]:
        """The metadata at the start of `packed`, and what follows it."""
        count, columns = int(packed[0]), int(packed[1])
        names = announced_lengths(columns)
        stop = 2 + count * (2 + len(names))
        assert count >= 0 and stop <= packed.size, f"metadata of {count} rows needs {stop} items, got {packed.size}"
        rows, homes, *lengths = packed[2:stop].reshape(2 + len(names), count)
        return RowMetadata(rows, homes, columns, dict(zip(names, lengths, strict=True))), packed[stop:]


@dataclass(frozen=True)
class RowDrop:
    """News of rows that nobody will train on, and why."""

    rows: Integers
    reason: str

    def pack(self) -> Integers:
        """One int64 array: number of rows, bytes of the reason, rows, reason."""
        reason = np.frombuffer(self.reason.encode(), dtype=np.uint8).astype(np.int64)
        return np.concatenate([np.array([self.rows.size, reason.size], dtype=np.int64), self.rows, reason])

    @staticmethod
    def unpack(packed: Integers) -> tuple[RowDrop, Integers]:
        """The drop at the start of `packed`, and what follows it."""
        count, num_bytes = int(packed[0]), int(packed[1])
        middle, stop = 2 + count, 2 + count + num_bytes
        assert stop <= packed.size, f"a drop of {count} rows needs {stop} items, got {packed.size}"
        reason = packed[middle:stop].astype(np.uint8).tobytes().decode()
        return RowDrop(packed[2:middle], reason), packed[stop:]


News = RowMetadata | RowDrop


def announced_lengths(columns: int) -> list[str]:
    """The columns of this mask whose row lengths travel in metadata, in schema order."""
    return [name for name in names_of_mask(columns) if rule_of(name).column.ragged and length_column(name) == name]


def pack_news(news: Iterable[News]) -> Integers:
    """Any number of news as one int64 array, each behind its kind."""
    parts = [np.empty(0, dtype=np.int64)]
    for entry in news:
        kind = _DROP if isinstance(entry, RowDrop) else _COLUMNS
        parts += [np.array([kind], dtype=np.int64), entry.pack()]
    return np.concatenate(parts)


def unpack_news(packed: Integers) -> list[News]:
    """What `pack_news` packed, in its order."""
    news: list[News] = []
    while packed.size:
        kind, packed = int(packed[0]), packed[1:]
        assert kind in (_COLUMNS, _DROP), f"metadata of unknown kind {kind}"
        entry, packed = RowDrop.unpack(packed) if kind == _DROP else RowMetadata.unpack(packed)
        news.append(entry)
    return news
