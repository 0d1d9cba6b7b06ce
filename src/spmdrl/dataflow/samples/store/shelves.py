"""Index of a warehouse: the places of rows' columns, and batches for its readers.

Rows that were stored together are a chunk. A slot is a chunk's number and a position in it, so that rows with
consecutive slots are adjacent and each of their columns is one slice of memory. A shelf has each row's slot for columns
that are always stored together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from spmdrl.dataflow.samples.schema import LENGTHS_OF
from spmdrl.dataflow.samples.volume import Link
from spmdrl.nouns.batch import Integers

_ABSENT = -1
_POSITION_BITS = 32
_POSITIONS = (1 << _POSITION_BITS) - 1
_OFFSET_BYTES = 8


class Memory(Protocol):
    """Memory with the values of chunks."""

    @property
    def link(self) -> Link:
        """Distance of the memory from this rank."""

    def array(self, name: str) -> NDArray[np.generic]:
        """Return all that it holds, as values of the column's dtype."""


class Chunk(NamedTuple):
    """Rows that were stored together."""

    num_rows: int
    memory: Memory
    starts: Mapping[str, int]
    """start of each column's values in the memory's array"""
    bounds: Mapping[str, Integers]
    """starts of rows among the values and the last one's end, by the column that lengths are announced under"""
    num_bytes: int
    """bytes of values and offsets"""


class Shelves:
    """Index of rows in chunks. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._chunks: list[Chunk] = []
        self._shelves: dict[tuple[str, ...], Integers] = {}
        """slot of each row, by the columns stored together; the last entry is no row's"""

    def add(
        self, names: tuple[str, ...], chunks: Sequence[Chunk], rows: ArrayLike, positions: ArrayLike | None = None
    ) -> None:
        """Add chunks of these columns. Raises ValueError for a row that has one of the columns already.

        `rows` are the rows at each position, or with `positions` at these, several of which may be equal.
        """
        index = np.asarray(rows, dtype=np.int64)
        for key, shelf in self._shelves.items():
            if both := set(names).intersection(key):
                known = index[shelf.take(index, mode="clip") != _ABSENT]
                if known.size:
                    raise ValueError(f"row {known[0]} has column {min(both)!r} already; each column is stored once")
        firsts = [number << _POSITION_BITS for number in range(len(self._chunks), len(self._chunks) + len(chunks))]
        runs = [np.arange(first, first + chunk.num_rows) for first, chunk in zip(firsts, chunks, strict=True)]
        slots = np.concatenate(runs)
        shelf, num_rows = self._shelves.get(names, np.zeros(0, dtype=np.int64)), int(index.max()) + 1
        if num_rows >= shelf.size:
            grown = np.full(max(num_rows + 1, 2 * shelf.size), _ABSENT)
            grown[: shelf.size] = shelf
            self._shelves[names] = shelf = grown
        shelf[index] = slots if positions is None else slots[np.asarray(positions, dtype=np.int64)]
        self._chunks += chunks
        self.num_bytes += sum(chunk.num_bytes for chunk in chunks)

    def find(self, names: Iterable[str], rows: Integers) -> list[Found]:
        """Find the rows, grouped by columns stored together. Raises KeyError, naming row and column, for missing
        ones."""
        alike: dict[tuple[tuple[str, ...], ...], list[str]] = {}
        for name in names:
            alike.setdefault(tuple([key for key in self._shelves if name in key]), []).append(name)
        found = []
        for keys, group in alike.items():
            slots = np.full(rows.size, _ABSENT)
            for key in keys:
                # A row is on only one of the shelves.
                np.maximum(slots, self._shelves[key].take(rows, mode="clip"), out=slots)
            _refuse_missing(group[0], rows, slots)
            found.append(Found(group, self._chunks, slots))
        return found


def _refuse_missing(name: str, rows: Integers, slots: Integers) -> None:
    """Raise KeyError for rows that have no slot."""
    if rows.min() < 0:
        raise KeyError(f"row {rows.min()} is in no warehouse: rows count from 0")
    missing = rows[slots == _ABSENT]
    if missing.size:
        more = f" (and {missing.size - 1} more rows)" if missing.size > 1 else ""
        raise KeyError(f"row {missing[0]}{more} has no column {name!r} in this warehouse")


class GatheredColumns:
    """Columns of some rows under assembly."""

    def __init__(self) -> None:
        self.columns: dict[str, Tensor] = {}
        self.offsets: dict[str, Tensor] = {}
        self.num_bytes: dict[Link, dict[str, int]] = {}
        """bytes by link and column, one offset per row included"""


class Found:
    """Rows found for columns stored together: pieces of consecutive slots, each one slice of memory per column."""

    def __init__(self, names: list[str], chunks: Sequence[Chunk], slots: Integers):
        breaks = np.flatnonzero(slots[1:] - slots[:-1] != 1)
        firsts, lasts = slots[np.concatenate([[0], breaks + 1])], slots[np.concatenate([breaks, [-1]])]
        self._names = names
        self._chunks = [chunks[number] for number in (firsts >> _POSITION_BITS).tolist()]
        """chunk of each piece"""
        links = [chunk.memory.link for chunk in self._chunks]
        self._are_at = {link: np.array([other is link for other in links]) for link in dict.fromkeys(links)}
        self._firsts, self._ends = firsts & _POSITIONS, (lasts & _POSITIONS) + 1

    def gather(self, into: GatheredColumns) -> None:
        """Add the columns: views if the rows are one piece, else copies. Those with the same lengths share offsets."""
        shared: dict[str, tuple[Tensor, Integers, Integers]] = {}
        for name in self._names:
            lengths, firsts, ends = LENGTHS_OF[name], self._firsts, self._ends
            offset_bytes = 0 if lengths is None else _OFFSET_BYTES
            if lengths is not None:
                if lengths not in shared:
                    shared[lengths] = self._cut(lengths)
                into.offsets[name], firsts, ends = shared[lengths]
            pieces = [
                chunk.memory.array(name)[chunk.starts[name] + first : chunk.starts[name] + end]
                for chunk, first, end in zip(self._chunks, firsts.tolist(), ends.tolist(), strict=True)
            ]
            values = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
            into.columns[name] = torch.from_numpy(values)
            num_bytes_P = values.itemsize * (ends - firsts) + offset_bytes * (self._ends - self._firsts)
            for link, is_there_P in self._are_at.items():
                into.num_bytes.setdefault(link, {})[name] = int(num_bytes_P[is_there_P].sum())

    def _cut(self, lengths: str) -> tuple[Tensor, Integers, Integers]:
        """Return the rows' offsets [B + 1], and where pieces begin and end among the values of their chunks."""
        spans = zip(self._chunks, self._firsts.tolist(), self._ends.tolist(), strict=True)
        bounds = np.concatenate([chunk.bounds[lengths][first : end + 1] for chunk, first, end in spans], dtype=np.int64)
        sizes = self._ends - self._firsts
        # Each piece has one more bound than rows.
        index_B = np.arange(sizes.sum()) + np.arange(sizes.size).repeat(sizes)
        offsets = np.concatenate([[0], (bounds[index_B + 1] - bounds[index_B]).cumsum()])
        lasts = (sizes + 1).cumsum() - 1
        return torch.from_numpy(offsets), bounds[lasts - sizes], bounds[lasts]


def collect(found: Iterable[Found]) -> GatheredColumns:
    """Return the columns of some rows: views if the rows are adjacent in one chunk, else one copy."""
    out = GatheredColumns()
    for placement in found:
        placement.gather(out)
    return out
