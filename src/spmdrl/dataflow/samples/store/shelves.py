"""Where each row's columns are: the index of a warehouse, and the batches that its readers get.

Rows that were stored together are a chunk. Slots number the rows of all chunks, one chunk behind the other, with an
unused slot behind each; a shelf holds the slots of all rows for the columns that are always stored together:

    chunk 0: rows 4 5 6 7       row    0    1    2    4    5    6    7
    chunk 1: rows 2 0           slot   6    -    5    0    1    2    3

Rows with consecutive slots lie one behind the other, so each column of theirs is one slice of memory. Tables by slot
and by chunk say which: nothing is done row by row or chunk by chunk until a reader has found its slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from spmdrl.dataflow.samples.schema import length_column, rule_of
from spmdrl.dataflow.samples.volume import Link
from spmdrl.types import Batch, Integers

_ABSENT = -1
_OFFSET_BYTES = 8


class Memory(Protocol):
    """Holds the values of chunks."""

    @property
    def link(self) -> Link:
        """How far it is from this rank."""

    def array(self, name: str) -> NDArray[np.generic]:
        """All that it holds, as values of the column's dtype."""


@dataclass(frozen=True)
class Chunks:
    """Rows that were stored together, one chunk or more with the same columns."""

    names: tuple[str, ...]
    """sorted"""
    sizes: Integers
    """rows of each chunk"""
    memories: Sequence[Memory]
    """of each chunk"""
    starts: Mapping[str, int | Integers]
    """by column, where the values of each chunk begin in its memory's array"""
    bounds: Mapping[str, Integers]
    """by the column that lengths are announced under, the offsets of each chunk, one chunk's behind the other's"""
    num_bytes: int
    """of values and offsets"""


class _Table:
    """Integers that grow at their end; what was written stays where it is for those who have a view of it."""

    def __init__(self) -> None:
        self.values: Integers = np.zeros(0, dtype=np.int64)

    def write(self, start: int, stop: int, values: ArrayLike) -> None:
        if stop > self.values.size:
            grown = np.zeros(max(stop, 2 * self.values.size, 1024), dtype=np.int64)
            grown[: self.values.size] = self.values
            self.values = grown
        self.values[start:stop] = values


class Shelves:
    """Finds rows in chunks. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.memories: list[Memory] = []
        """of each chunk"""
        self.chunk_of_slot = _Table()
        self.bounds: dict[str, _Table] = {}
        """by the column that lengths are announced under, by slot: where a row's values begin among its chunk's"""
        self.starts: dict[str, _Table] = {}
        """by column and chunk, where its values begin in memory; of a dense column, where those of slot 0 would"""
        self._num_slots = 0
        self._slots: dict[tuple[str, ...], Integers] = {}
        """by the columns that are stored together, the slot of each row"""

    def add(self, chunks: Chunks, rows: ArrayLike, positions: ArrayLike | None = None) -> None:
        """Add chunks. Raises ValueError for a row that has one of their columns already.

        `rows` are the rows at each position, or with `positions` those at these, of which several may be equal.
        """
        index, names = np.asarray(rows, dtype=np.int64), chunks.names
        last = int(index.max())
        self._refuse_known(names, index, last)
        first_slot, first_chunk, sizes = self._num_slots, len(self.memories), chunks.sizes
        num_chunks, num_rows = len(sizes), int(sizes.sum())
        stop = first_slot + num_rows + num_chunks
        slots = np.arange(first_slot, first_slot + num_rows)
        chunk_starts = np.array([first_slot])
        numbers = np.array([first_chunk])
        if num_chunks > 1:
            within = np.arange(num_chunks)
            slots += within.repeat(sizes)
            chunk_starts = first_slot + within + sizes.cumsum() - sizes
            numbers = (first_chunk + within).repeat(sizes + 1)
        self.chunk_of_slot.write(first_slot, stop, numbers)
        for key, bounds in chunks.bounds.items():
            self.bounds.setdefault(key, _Table()).write(first_slot, stop, bounds)
        for name, starts in chunks.starts.items():
            own = starts if rule_of(name).column.ragged else starts - chunk_starts
            self.starts.setdefault(name, _Table()).write(first_chunk, first_chunk + num_chunks, own)
        self._slots[names][index] = slots if positions is None else slots[np.asarray(positions, dtype=np.int64)]
        self.memories += chunks.memories
        self.num_bytes += chunks.num_bytes
        self._num_slots = stop

    def find(self, names: Iterable[str], rows: Integers) -> list[Placement]:
        """Where the rows lie, for columns that lie alike. Raises KeyError naming row and column if one is missing."""
        alike: dict[tuple[tuple[str, ...], ...], list[str]] = {}
        for name in names:
            alike.setdefault(tuple([key for key in self._slots if name in key]), []).append(name)
        if int(rows.min()) < 0:
            raise KeyError(f"row {rows.min()} is in no warehouse: rows count from 0")
        return [Placement(self, group, self._slots_of(group[0], keys, rows)) for keys, group in alike.items()]

    def _refuse_known(self, names: tuple[str, ...], rows: Integers, last: int) -> None:
        """Raise ValueError for a row that has one of these columns, and make room for the slots of all of them."""
        wanted = set(names)
        for key, known in self._slots.items():
            if wanted.isdisjoint(key):
                continue
            index = rows if last < known.size else rows[rows < known.size]
            has = known[index] != _ABSENT
            if has.any():
                both = min(wanted.intersection(key))
                raise ValueError(f"row {index[has][0]} has column {both!r} already; each column is stored once")
        slots = self._slots.get(names)
        if slots is None or last >= slots.size:
            old = np.empty(0, dtype=np.int64) if slots is None else slots
            self._slots[names] = slots = np.full(max(last + 1, 2 * old.size), _ABSENT, dtype=np.int64)
            slots[: old.size] = old

    def _slots_of(self, name: str, keys: Sequence[tuple[str, ...]], rows: Integers) -> Integers:
        """The slot of each row."""
        slots = None
        for key in keys:
            table = self._slots[key]
            found = table.take(rows, mode="clip")
            found[rows >= table.size] = _ABSENT
            # A row is on one of the shelves, and absent, so -1, on all others.
            slots = found if slots is None else np.maximum(slots, found)
        missing = rows if slots is None else rows[slots == _ABSENT]
        if slots is None or missing.size:
            more = f" (and {missing.size - 1} more rows)" if missing.size > 1 else ""
            raise KeyError(f"row {missing[0]}{more} has no column {name!r} in this warehouse")
        return slots


class Placement:
    """Where some rows lie, for columns that lie alike."""

    def __init__(self, shelves: Shelves, names: list[str], slots: Integers):
        self.names = names
        self._shelves = shelves
        self._slots = slots
        # Rows that lie one behind the other are a run: its first slot, and the one after its last.
        breaks = np.flatnonzero(slots[1:] - slots[:-1] != 1)
        self._is_run = not breaks.size
        self._firsts = slots[:1] if self._is_run else slots[np.concatenate([[0], breaks + 1])]
        self._ends = slots[-1:] + 1 if self._is_run else slots[np.concatenate([breaks, [-1]])] + 1
        self._chunks = shelves.chunk_of_slot.values[self._firsts]
        self._memories = [shelves.memories[chunk] for chunk in self._chunks.tolist()]
        one = self._memories[0]
        self._memory = one if all(memory is one for memory in self._memories) else None
        """the one that holds all rows"""
        self._offsets: dict[str, Tensor] = {}

    def offsets(self, name: str) -> Tensor:
        """Offsets [B + 1] of a ragged column in the rows; columns with the same row lengths share them."""
        key = length_column(name)
        if key not in self._offsets:
            self._offsets[key] = torch.from_numpy(self._cut(self._shelves.bounds[key].values))
        return self._offsets[key]

    def values(self, name: str) -> NDArray[np.generic]:
        """The column's values in all rows: a view of one run, else a copy."""
        starts, firsts, ends = self._shelves.starts[name].values, self._firsts, self._ends
        if rule_of(name).column.ragged:
            bounds = self._shelves.bounds[length_column(name)].values
            firsts, ends = bounds[firsts], bounds[ends]
        if self._is_run:
            start = int(starts[self._chunks[0]])
            return self._memories[0].array(name)[start + int(firsts[0]) : start + int(ends[0])]
        starts = starts[self._chunks]
        spans = zip((starts + firsts).tolist(), (starts + ends).tolist(), strict=True)
        if self._memory is not None:
            array = self._memory.array(name)
            return np.concatenate([array[start:end] for start, end in spans])
        pieces = zip(self._memories, spans, strict=True)
        return np.concatenate([memory.array(name)[start:end] for memory, (start, end) in pieces])

    def num_bytes(self, batch: Batch) -> dict[Link, dict[str, int]]:
        """Bytes of each column of the rows, one offset per row included, by where they lie. `batch` has the columns."""
        if self._memory is not None:
            return {self._memory.link: {name: _bytes_of(batch, name) for name in self.names}}
        links = np.array([memory.link.value for memory in self._memories])
        link_of_row = links.repeat(self._ends - self._firsts)
        return {
            Link(link): {name: _bytes_of(batch, name, link_of_row == link) for name in self.names}
            for link in sorted(set(links.tolist()))
        }

    def _cut(self, bounds: Integers) -> Integers:
        if self._is_run:
            own = bounds[self._firsts[0] : self._ends[0] + 1]
            return own if own[0] == 0 else own - own[0]
        out = np.zeros(self._slots.size + 1, dtype=np.int64)
        np.cumsum(bounds[self._slots + 1] - bounds[self._slots], out=out[1:])
        return out


def collect(found: Iterable[Placement], rows: Integers) -> Batch:
    """The columns of some rows: views where the rows lie one behind the other in one chunk, else one copy."""
    out = Batch(torch.from_numpy(rows.copy()))
    for placement in found:
        for name in placement.names:
            values = torch.from_numpy(placement.values(name))
            if rule_of(name).column.ragged:
                out.put_ragged(name, values, placement.offsets(name))
            else:
                out.put_dense(name, values)
    return out


def _bytes_of(batch: Batch, name: str, rows: NDArray[np.bool_] | None = None) -> int:
    """Of a column in all or some of the rows."""
    is_ragged = batch.is_ragged(name)
    values = batch.values(name) if is_ragged else batch.dense(name)
    num_rows = len(batch) if rows is None else int(rows.sum())
    if not is_ragged:
        return num_rows * values.element_size()
    num_values = values.numel() if rows is None else int(np.diff(batch.offsets(name).numpy())[rows].sum())
    return num_values * values.element_size() + num_rows * _OFFSET_BYTES
