"""Where each row's columns are: the index of a warehouse, and the batches that its readers get."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from spmdrl.dataflow.samples.schema import length_column
from spmdrl.dataflow.samples.store.frame import Arrays
from spmdrl.types import Batch, Integers

_ABSENT = -1
_OFFSET_BYTES = 8


class Chunk:
    """Rows that were stored together; they never change."""

    def __init__(self, num_rows: int, names: Sequence[str], read: Callable[[], Arrays], origin: object = None):
        """`read` gives the rows, when they are wanted first; `origin` is for the owner of the memory."""
        self.num_rows = num_rows
        self.names = tuple(names)
        self.origin = origin
        self.num_live = 0
        """how many rows still point here"""
        self._read = read

    @cached_property
    def arrays(self) -> Arrays:
        return self._read()

    @property
    def num_bytes(self) -> int:
        parts = [*self.arrays.values.values(), *self.arrays.offsets.values()]
        return sum(part.nbytes for part in parts)


@dataclass
class _Shelf:
    """Columns that are always stored together: row -> (chunk number, position in the chunk)."""

    names: tuple[str, ...]
    chunk: Integers = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    position: Integers = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def reach(self, num_rows: int) -> None:
        """Grow so that rows below `num_rows` can be looked up."""
        if num_rows > self.chunk.size:
            room = max(num_rows, 2 * self.chunk.size) - self.chunk.size
            self.chunk = np.pad(self.chunk, (0, room), constant_values=_ABSENT)
            self.position = np.pad(self.position, (0, room), constant_values=_ABSENT)

    def chunks_of(self, rows: Integers) -> Integers:
        """The chunk of each row, or absent."""
        inside = rows < self.chunk.size
        if inside.all():
            return self.chunk[rows]
        numbers = np.full(rows.size, _ABSENT, dtype=np.int64)
        numbers[inside] = self.chunk[rows[inside]]
        return numbers


@dataclass(frozen=True)
class Placement:
    """Where some rows lie, for columns that lie alike: the chunk of each row, and its position there."""

    names: list[str]
    numbers: Integers
    positions: Integers
    chunks: Mapping[int, Chunk]
    _lengths: dict[str, Integers] = field(default_factory=dict)

    @cached_property
    def runs(self) -> Runs:
        """The rows, those that lie one behind the other taken together."""
        numbers, positions = self.numbers, self.positions
        breaks = np.flatnonzero((positions[1:] != positions[:-1] + 1) | (numbers[1:] != numbers[:-1])) + 1
        firsts = np.concatenate([[0], breaks])
        lasts = np.concatenate([breaks, [numbers.size]]) - 1
        return Runs(numbers[firsts].tolist(), positions[firsts], positions[lasts] + 1)

    def is_ragged(self, name: str) -> bool:
        return name in next(iter(self.chunks.values())).arrays.offsets

    def lengths(self, name: str) -> Integers:
        """Row lengths [B] of a ragged column."""
        key = length_column(name)
        if key not in self._lengths:
            starts = self._bounds(name, self.numbers, self.positions)
            self._lengths[key] = self._bounds(name, self.numbers, self.positions + 1) - starts
        return self._lengths[key]

    def cuts(self, name: str) -> list[slice]:
        """Where the values of each run lie in its chunk."""
        numbers = np.array(self.runs.numbers)
        starts = self._bounds(name, numbers, self.runs.starts)
        stops = self._bounds(name, numbers, self.runs.stops)
        return [slice(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]

    def pieces(self, name: str, slices: Iterable[slice]) -> list[NDArray[np.generic]]:
        """The column's values in each run."""
        values = {number: chunk.arrays.values[name] for number, chunk in self.chunks.items()}
        return [values[number][part] for number, part in zip(self.runs.numbers, slices, strict=True)]

    def gather(self, name: str, slices: Iterable[slice]) -> NDArray[np.generic]:
        """The column's values in all rows: a view of one run, else a copy."""
        if len(self.repeats) * 2 < self.numbers.size and len(self.runs.numbers) > 1:
            return self._repeated(name)
        pieces = self.pieces(name, slices)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    @cached_property
    def repeats(self) -> Integers:
        """The first of each series of rows that lie at the same place, as the prompts of a group do."""
        numbers, positions = self.numbers, self.positions
        differs = (positions[1:] != positions[:-1]) | (numbers[1:] != numbers[:-1])
        return np.concatenate([[0], np.flatnonzero(differs) + 1])

    def _repeated(self, name: str) -> NDArray[np.generic]:
        """The values of rows most of which lie where the one before lies, each copied from there as often."""
        firsts = self.repeats
        counts = np.diff(firsts, append=self.numbers.size)
        numbers, positions = self.numbers[firsts], self.positions[firsts]
        starts, stops = self._bounds(name, numbers, positions), self._bounds(name, numbers, positions + 1)
        values = {number: chunk.arrays.values[name] for number, chunk in self.chunks.items()}
        out = np.empty(int(((stops - starts) * counts).sum()), next(iter(values.values())).dtype)
        end = 0
        for number, start, stop, count in zip(
            numbers.tolist(), starts.tolist(), stops.tolist(), counts.tolist(), strict=True
        ):
            begin, end = end, end + (stop - start) * count
            out[begin:end].reshape(count, stop - start)[:] = values[number][start:stop]
        return out

    def num_bytes(self, rows: NDArray[np.bool_] | None = None) -> dict[str, int]:
        """Bytes of each column in all or some of the rows, one offset a row included."""
        num_rows, num_values, out = int(self.numbers.size if rows is None else rows.sum()), dict[str, int](), {}
        values = next(iter(self.chunks.values())).arrays.values
        for name in self.names:
            out[name] = num_rows * values[name].itemsize
            if self.is_ragged(name):
                key = length_column(name)
                if key not in num_values:
                    lengths = self.lengths(name)
                    num_values[key] = int((lengths if rows is None else lengths[rows]).sum())
                out[name] = num_values[key] * values[name].itemsize + num_rows * _OFFSET_BYTES
        return out

    def _bounds(self, name: str, numbers: Integers, positions: Integers) -> Integers:
        """The offsets at these positions of these chunks."""
        if len(self.chunks) == 1:
            return next(iter(self.chunks.values())).arrays.offsets[name][positions]
        out = np.empty_like(positions)
        for number, chunk in self.chunks.items():
            here = numbers == number
            out[here] = chunk.arrays.offsets[name][positions[here]]
        return out


class Runs(NamedTuple):
    """Rows that lie one behind the other: chunk number, first position and the one after the last."""

    numbers: list[int]
    starts: Integers
    stops: Integers


class Shelves:
    """Finds rows in chunks. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self._shelves: dict[tuple[str, ...], _Shelf] = {}
        self._chunks: dict[int, Chunk] = {}
        self._next_chunk = 0

    @property
    def chunks(self) -> Iterable[Chunk]:
        return self._chunks.values()

    def add(self, chunk: Chunk, rows: ArrayLike, positions: ArrayLike | None = None) -> None:
        """Add a chunk. Raises ValueError for a row that has one of its columns already.

        `rows` says which row each position holds, or with `positions` which rows lie where: several at one, it may be.
        """
        index = np.asarray(rows, dtype=np.int64)
        place = np.arange(chunk.num_rows) if positions is None else np.asarray(positions, dtype=np.int64)
        assert index.shape == place.shape, (index.shape, place.shape)
        self._refuse_known(chunk.names, index)
        shelf = self._shelves.setdefault(chunk.names, _Shelf(chunk.names))
        shelf.reach(int(index.max()) + 1)
        number, self._next_chunk = self._next_chunk, self._next_chunk + 1
        self._chunks[number] = chunk
        chunk.num_live = index.size
        shelf.chunk[index] = number
        shelf.position[index] = place

    def drop(self, rows: ArrayLike | Tensor) -> list[Chunk]:
        """Forget all columns of the rows; returns chunks that nothing points to any more. Unknown rows are ignored."""
        index = np.asarray(rows, dtype=np.int64)
        return [chunk for shelf in self._shelves.values() for chunk in self._release(shelf, index)]

    def find(self, names: Iterable[str], rows: Integers) -> list[Placement]:
        """Where the rows lie, for columns that lie alike. Raises KeyError naming row and column if one is missing."""
        alike: dict[tuple[tuple[str, ...], ...], list[str]] = {}
        for name in names:
            shelves = tuple(key for key in self._shelves if name in key)
            alike.setdefault(shelves, []).append(name)
        return [self._place(group, keys, rows) for keys, group in alike.items()]

    def _place(self, names: list[str], keys: Sequence[tuple[str, ...]], rows: Integers) -> Placement:
        numbers = np.full(rows.size, _ABSENT, dtype=np.int64)
        positions = numbers
        for key in keys:
            shelf = self._shelves[key]
            found = shelf.chunks_of(rows)
            here = found != _ABSENT
            if here.all():
                numbers, positions = found, shelf.position[rows]
                break
            numbers, positions = numbers.copy(), positions.copy()
            numbers[here], positions[here] = found[here], shelf.position[rows[here]]
        missing = rows[numbers == _ABSENT]
        if missing.size:
            more = f" (and {missing.size - 1} more rows)" if missing.size > 1 else ""
            raise KeyError(f"row {missing[0]}{more} has no column {names[0]!r} in this warehouse")
        held = {int(numbers[0])} if (numbers == numbers[0]).all() else set(numbers.tolist())
        return Placement(names, numbers, positions, {number: self._chunks[number] for number in held})

    def _refuse_known(self, names: tuple[str, ...], rows: Integers) -> None:
        for shelf in self._shelves.values():
            both = set(names).intersection(shelf.names)
            known = rows[shelf.chunks_of(rows) != _ABSENT] if both else rows[:0]
            if known.size:
                raise ValueError(f"row {known[0]} has column {min(both)!r} already; each column is stored once")

    def _release(self, shelf: _Shelf, rows: Integers) -> list[Chunk]:
        known = rows[(rows >= 0) & (rows < shelf.chunk.size)]
        numbers = shelf.chunk[known]
        held = numbers[numbers != _ABSENT]
        if not held.size:
            return []
        shelf.chunk[known] = _ABSENT
        released = []
        for number, count in zip(*(part.tolist() for part in np.unique(held, return_counts=True)), strict=True):
            chunk = self._chunks[number]
            chunk.num_live -= count
            if chunk.num_live == 0:
                released.append(self._chunks.pop(number))
        return released


def collect(found: Iterable[Placement], rows: Integers) -> Batch:
    """The columns of some rows: views where the rows lie one behind the other in one chunk, else one copy."""
    out = Batch(torch.from_numpy(rows.copy()))
    for placement in found:
        whole = [slice(*bounds) for bounds in zip(*(part.tolist() for part in placement.runs[1:]), strict=True)]
        cuts: dict[str, tuple[list[slice], Tensor]] = {}
        for name in placement.names:
            if not placement.is_ragged(name):
                pieces = placement.pieces(name, whole)
                out.put_dense(name, torch.from_numpy(pieces[0] if len(pieces) == 1 else np.concatenate(pieces)))
                continue
            # Columns with the same row lengths are cut at the same places.
            lengths = length_column(name)
            if lengths not in cuts:
                offsets = np.concatenate([[0], placement.lengths(name).cumsum()])
                cuts[lengths] = placement.cuts(name), torch.from_numpy(offsets)
            slices, shared = cuts[lengths]
            out.put_ragged(name, torch.from_numpy(placement.gather(name, slices)), shared)
    return out
