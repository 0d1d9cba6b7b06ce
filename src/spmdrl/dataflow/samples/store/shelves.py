"""Where each row's columns are: the index of a warehouse, and the batches that its readers get.

Rows that were stored together are a chunk. A row's slot is its chunk's number and its position there in one integer,
and a shelf holds the slots of all rows for the columns that are always stored together:

    chunk 0: rows 4 5 6 7       row    0    1    2    4    5    6    7
    chunk 1: rows 2 0           slot  1,1   -   1,0  0,0  0,1  0,2  0,3

Rows with consecutive slots lie one behind the other, so each column of theirs is one slice of the chunk's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from spmdrl.dataflow.samples.schema import length_column
from spmdrl.dataflow.samples.store.frame import Arrays
from spmdrl.types import Batch, Integers

_ABSENT = -1
_BITS_OF_POSITION = 32
_POSITION = (1 << _BITS_OF_POSITION) - 1
_OFFSET_BYTES = 8


class Chunk:
    """Rows that were stored together; they never change."""

    def __init__(self, num_rows: int, names: Iterable[str], read: Callable[[], Arrays], *, is_own: bool = True):
        """`read` gives the rows, when they are wanted first; `is_own`: this rank stored them."""
        self.num_rows = num_rows
        self.names = tuple(names)
        self.is_own = is_own
        self._read = read

    @cached_property
    def arrays(self) -> Arrays:
        return self._read()

    @property
    def num_bytes(self) -> int:
        parts = [*self.arrays.values.values(), *self.arrays.offsets.values()]
        return sum(part.nbytes for part in parts)


@dataclass(frozen=True)
class Placement:
    """Where some rows lie, for columns that lie alike."""

    names: list[str]
    slots: Integers
    chunks: Mapping[int, Chunk]
    """by number, those that hold some of the rows"""
    _cuts: dict[str, tuple[Tensor, list[int], list[int]]] = field(default_factory=dict)

    @property
    def numbers(self) -> Integers:
        """The chunk of each row."""
        return self.slots >> _BITS_OF_POSITION

    def is_ragged(self, name: str) -> bool:
        return name in next(iter(self.chunks.values())).arrays.offsets

    def offsets(self, name: str) -> Tensor:
        """Offsets [B + 1] of a ragged column in the rows; columns with the same row lengths share them."""
        return self._cut(name)[0]

    def values(self, name: str) -> NDArray[np.generic]:
        """The column's values in all rows: a view of one run, else a copy."""
        firsts, ends = self._runs
        numbers = (firsts >> _BITS_OF_POSITION).tolist()
        if self.is_ragged(name):
            _, starts, stops = self._cut(name)
        else:
            starts, stops = (firsts & _POSITION).tolist(), (ends & _POSITION).tolist()
        values = {number: chunk.arrays.values[name] for number, chunk in self.chunks.items()}
        pieces = [values[number][start:stop] for number, start, stop in zip(numbers, starts, stops, strict=True)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def num_bytes(self, rows: NDArray[np.bool_] | None = None) -> dict[str, int]:
        """Bytes of each column in all or some of the rows, one offset per row included."""
        num_rows, out = int(self.slots.size if rows is None else rows.sum()), {}
        values = next(iter(self.chunks.values())).arrays.values
        for name in self.names:
            out[name] = num_rows * values[name].itemsize
            if self.is_ragged(name):
                lengths = np.diff(self.offsets(name).numpy())
                num_values = int((lengths if rows is None else lengths[rows]).sum())
                out[name] = num_values * values[name].itemsize + num_rows * _OFFSET_BYTES
        return out

    @cached_property
    def _runs(self) -> tuple[Integers, Integers]:
        """Rows that lie one behind the other are a run: its first slot, and the one after its last."""
        breaks = np.flatnonzero(np.diff(self.slots) != 1)
        firsts, lasts = np.concatenate([[0], breaks + 1]), np.concatenate([breaks, [self.slots.size - 1]])
        return self.slots[firsts], self.slots[lasts] + 1

    def _cut(self, name: str) -> tuple[Tensor, list[int], list[int]]:
        """The rows' offsets, and where the values of each run begin and end in its chunk."""
        key = length_column(name)
        if key not in self._cuts:
            lengths = self._bounds(name, self.slots + 1) - self._bounds(name, self.slots)
            offsets = torch.from_numpy(np.concatenate([[0], lengths.cumsum()]))
            firsts, ends = self._runs
            self._cuts[key] = offsets, self._bounds(name, firsts).tolist(), self._bounds(name, ends).tolist()
        return self._cuts[key]

    def _bounds(self, name: str, slots: Integers) -> Integers:
        """The chunks' offsets at these slots."""
        positions = slots & _POSITION
        if len(self.chunks) == 1:
            return next(iter(self.chunks.values())).arrays.offsets[name][positions]
        numbers, out = slots >> _BITS_OF_POSITION, np.empty_like(slots)
        for number, chunk in self.chunks.items():
            here = numbers == number
            out[here] = chunk.arrays.offsets[name][positions[here]]
        return out


class Shelves:
    """Finds rows in chunks. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self._slots: dict[tuple[str, ...], Integers] = {}
        """by the columns that are stored together, the slot of each row"""

    def add(self, chunk: Chunk, rows: ArrayLike, positions: ArrayLike | None = None) -> None:
        """Add a chunk. Raises ValueError for a row that has one of its columns already.

        `rows` are the rows at each position, or with `positions` those at these, of which several may be equal.
        """
        index = np.asarray(rows, dtype=np.int64)
        place = np.arange(chunk.num_rows) if positions is None else np.asarray(positions, dtype=np.int64)
        assert index.shape == place.shape, (index.shape, place.shape)
        for names in self._slots:
            both = set(names).intersection(chunk.names)
            known = index[self._slots_of(names, index) != _ABSENT] if both else index[:0]
            if known.size:
                raise ValueError(f"row {known[0]} has column {min(both)!r} already; each column is stored once")
        slots = self._slots.get(chunk.names, np.empty(0, dtype=np.int64))
        if (last := int(index.max())) >= slots.size:
            slots = np.pad(slots, (0, max(last + 1, 2 * slots.size) - slots.size), constant_values=_ABSENT)
        slots[index] = len(self.chunks) << _BITS_OF_POSITION | place
        self._slots[chunk.names] = slots
        self.chunks.append(chunk)

    def find(self, names: Iterable[str], rows: Integers) -> list[Placement]:
        """Where the rows lie, for columns that lie alike. Raises KeyError naming row and column if one is missing."""
        alike: dict[tuple[tuple[str, ...], ...], list[str]] = {}
        for name in names:
            alike.setdefault(tuple(key for key in self._slots if name in key), []).append(name)
        return [self._place(group, keys, rows) for keys, group in alike.items()]

    def _place(self, names: list[str], keys: Sequence[tuple[str, ...]], rows: Integers) -> Placement:
        slots = np.full(rows.size, _ABSENT, dtype=np.int64)
        for key in keys:
            # A row is on one of the shelves, and absent, so -1, on all others.
            slots = np.maximum(slots, self._slots_of(key, rows))
        missing = rows[slots == _ABSENT]
        if missing.size:
            more = f" (and {missing.size - 1} more rows)" if missing.size > 1 else ""
            raise KeyError(f"row {missing[0]}{more} has no column {names[0]!r} in this warehouse")
        numbers = slots >> _BITS_OF_POSITION
        held = [int(numbers[0])] if (numbers == numbers[0]).all() else np.unique(numbers).tolist()
        return Placement(names, slots, {number: self.chunks[number] for number in held})

    def _slots_of(self, names: tuple[str, ...], rows: Integers) -> Integers:
        slots = self._slots[names]
        return np.where(rows < slots.size, slots[np.minimum(rows, slots.size - 1)], _ABSENT)


def collect(found: Iterable[Placement], rows: Integers) -> Batch:
    """The columns of some rows: views where the rows lie one behind the other in one chunk, else one copy."""
    out = Batch(torch.from_numpy(rows.copy()))
    for placement in found:
        for name in placement.names:
            values = torch.from_numpy(placement.values(name))
            if placement.is_ragged(name):
                out.put_ragged(name, values, placement.offsets(name))
            else:
                out.put_dense(name, values)
    return out
