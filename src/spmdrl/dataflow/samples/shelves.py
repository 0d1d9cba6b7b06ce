"""Where each row's columns are: the index of a warehouse, and the copies that its readers get."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from spmdrl.types import Batch, offsets_of

Integers = NDArray[np.int64]


class Chunk:
    """Rows that were stored together; they never change."""

    def __init__(self, batch: Batch, origin: object = None):
        self.batch = batch
        self.origin = origin
        """whatever the owner of the memory needs to know when the chunk is let go"""
        self.num_live = 0
        """how many (row, column) pairs still point here"""
        self._lengths: dict[str, Integers] = {}
        self._runs: dict[str, tuple[Tensor, ...]] = {}

    def lengths(self, name: str) -> Integers:
        """Row lengths of a ragged column."""
        if name not in self._lengths:
            self._lengths[name] = np.diff(self.batch.offsets(name).numpy())
        return self._lengths[name]

    def runs(self, name: str) -> tuple[Tensor, ...]:
        """Each row's values of a ragged column, as views."""
        if name not in self._runs:
            self._runs[name] = self.batch.values(name).split(self.lengths(name).tolist())
        return self._runs[name]


@dataclass
class _Shelf:
    """One column: row -> (chunk number, position in the chunk); -1 means absent."""

    chunk: Integers
    position: Integers

    @classmethod
    def empty(cls) -> _Shelf:
        return cls(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))

    def reach(self, num_rows: int) -> None:
        """Grow so that rows below `num_rows` can be looked up."""
        if num_rows > self.chunk.size:
            room = max(num_rows, 2 * self.chunk.size) - self.chunk.size
            self.chunk = np.pad(self.chunk, (0, room), constant_values=-1)
            self.position = np.pad(self.position, (0, room), constant_values=-1)


class Shelves:
    """Finds rows in chunks. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self._shelves: dict[str, _Shelf] = {}
        self._chunks: dict[int, Chunk] = {}
        self._next_chunk = 0

    @property
    def chunks(self) -> Iterable[Chunk]:
        return self._chunks.values()

    def add(self, chunk: Chunk, rows: ArrayLike | None = None, positions: ArrayLike | None = None) -> list[Chunk]:
        """Take a chunk in; known columns of a row are replaced. Returns chunks that nothing points to any more.

        `rows` and `positions` together place several rows at one position: the prompt of a group is held once.
        """
        batch = chunk.batch
        row_index = np.asarray(batch.rows if rows is None else rows, dtype=np.int64)
        place = np.arange(len(batch)) if positions is None else np.asarray(positions, dtype=np.int64)
        assert row_index.shape == place.shape, (row_index.shape, place.shape)
        if not row_index.size or not batch.names:
            return [chunk]
        number, self._next_chunk = self._next_chunk, self._next_chunk + 1
        self._chunks[number] = chunk
        chunk.num_live = row_index.size * len(batch.names)
        released: list[Chunk] = []
        for name in batch.names:
            shelf = self._shelves.setdefault(name, _Shelf.empty())
            shelf.reach(int(row_index.max()) + 1)
            released += self._release(shelf.chunk[row_index])
            shelf.chunk[row_index] = number
            shelf.position[row_index] = place
        return released

    def drop(self, rows: ArrayLike | Tensor) -> list[Chunk]:
        """Forget all columns of the rows; returns chunks that nothing points to any more. Unknown rows are ignored."""
        row_index = np.asarray(rows, dtype=np.int64)
        released: list[Chunk] = []
        for shelf in self._shelves.values():
            known = row_index[(row_index >= 0) & (row_index < shelf.chunk.size)]
            released += self._release(shelf.chunk[known])
            shelf.chunk[known] = -1
        return released

    def rows_with(self, name: str) -> Integers:
        """Which rows have the column, ascending."""
        return np.flatnonzero(self._shelves.get(name, _Shelf.empty()).chunk >= 0)

    @property
    def names(self) -> list[str]:
        return sorted(self._shelves)

    def find(self, name: str, rows: Integers) -> Found:
        """Where the rows' column is; a missing one is a KeyError naming row and column."""
        shelf = self._shelves.get(name, _Shelf.empty())
        inside = (rows >= 0) & (rows < shelf.chunk.size)
        numbers = np.full(rows.size, -1, dtype=np.int64)
        numbers[inside] = shelf.chunk[rows[inside]]
        missing = rows[numbers < 0]
        if missing.size:
            more = f" (and {missing.size - 1} more rows)" if missing.size > 1 else ""
            raise KeyError(f"row {missing[0]}{more} has no column {name!r} in this warehouse")
        chunks = {number: self._chunks[number] for number in np.unique(numbers).tolist()}
        return Found(numbers, shelf.position[rows], chunks)

    def _release(self, numbers: Integers) -> list[Chunk]:
        released = []
        held, counts = np.unique(numbers[numbers >= 0], return_counts=True)
        for number, count in zip(held.tolist(), counts.tolist(), strict=True):
            chunk = self._chunks[number]
            chunk.num_live -= count
            if chunk.num_live == 0:
                released.append(self._chunks.pop(number))
        return released


@dataclass(frozen=True)
class Found:
    """Where one column of some rows is."""

    numbers: Integers
    positions: Integers
    chunks: Mapping[int, Chunk]

    def run(self) -> tuple[Chunk, int] | None:
        """The one chunk that holds the rows one behind the other, and the position of the first; None if scattered."""
        if len(self.chunks) != 1:
            return None
        start = int(self.positions[0])
        if not np.array_equal(self.positions, np.arange(start, start + self.positions.size)):
            return None
        return next(iter(self.chunks.values())), start

    def pairs(self) -> list[tuple[Chunk, int]]:
        """Chunk and position of each row."""
        return [(self.chunks[n], p) for n, p in zip(self.numbers.tolist(), self.positions.tolist(), strict=True)]


def collect(found_by_name: Mapping[str, Found], rows: Integers) -> Batch:
    """The columns of some rows: views where the rows lie one behind the other in one chunk, else one copy."""
    out = Batch(torch.from_numpy(rows.copy()))
    # Columns of one chunk share their offsets, so what is computed for one serves the others.
    offsets: dict[tuple[int, int], Tensor] = {}
    for name, found in found_by_name.items():
        run = found.run()
        if run is not None:
            _view_column(name, *run, out, offsets)
        elif next(iter(found.chunks.values())).batch.is_ragged(name):
            _copy_ragged(name, found, out)
        else:
            out.put_dense(name, _copy_dense(name, found))
    return out


def _view_column(name: str, chunk: Chunk, start: int, out: Batch, offsets: dict[tuple[int, int], Tensor]) -> None:
    batch, stop = chunk.batch, start + len(out)
    if not batch.is_ragged(name):
        out.put_dense(name, batch.dense(name)[start:stop])
        return
    bounds = batch.offsets(name)
    first, last = int(bounds[start]), int(bounds[stop])
    key = (bounds.data_ptr(), start)
    if key not in offsets:
        offsets[key] = bounds[start : stop + 1] - first if start else bounds[: stop + 1]
    out.put_ragged(name, batch.values(name)[first:last], offsets[key])


def _copy_dense(name: str, found: Found) -> Tensor:
    starts, size = {}, 0
    for number, chunk in found.chunks.items():
        starts[number], size = size, size + len(chunk.batch)
    joined = torch.cat([chunk.batch.dense(name) for chunk in found.chunks.values()])
    places = [
        starts[number] + position
        for number, position in zip(found.numbers.tolist(), found.positions.tolist(), strict=True)
    ]
    return joined[torch.tensor(places)]


def _copy_ragged(name: str, found: Found, out: Batch) -> None:
    pairs = found.pairs()
    runs = [chunk.runs(name)[position] for chunk, position in pairs]
    lengths = torch.tensor([run.numel() for run in runs], dtype=torch.int64)
    out.put_ragged(name, torch.cat(runs), offsets_of(lengths))
