"""A warehouse: the payload of the rows whose home is this node, held by the node's local-rank-0 process."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from spmdrl.dataflow.samples.schema import empty_batch
from spmdrl.types import Batch

Integers = NDArray[np.int64]


class _Shelf:
    """Where each row of one column is: row -> (chunk, position in the chunk)."""

    def __init__(self) -> None:
        self.chunk: Integers = np.empty(0, dtype=np.int64)
        self.position: Integers = np.empty(0, dtype=np.int64)

    def reach(self, num_rows: int) -> None:
        """Grow so that rows below `num_rows` can be looked up; -1 means absent."""
        if num_rows > self.chunk.size:
            room = max(num_rows, 2 * self.chunk.size) - self.chunk.size
            self.chunk = np.pad(self.chunk, (0, room), constant_values=-1)
            self.position = np.pad(self.position, (0, room), constant_values=-1)


class Warehouse:
    """Columns in packed chunks, one chunk a put. Thread-safe: RPC threads and the owner call it at once.

    Chunks never change once they are in, so they are read outside the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shelves: dict[str, _Shelf] = {}
        self._chunks: dict[int, Batch] = {}
        self._live: dict[int, int] = {}
        """How many (row, column) pairs still point to a chunk."""
        self._next_chunk = 0

    def put(self, batch: Batch, positions: ArrayLike | None = None, rows: ArrayLike | None = None) -> None:
        """Take over the batch's tensors, which nobody may change afterwards; known columns of a row are replaced.

        `rows` and `positions` together store several rows at one position: the prompt of a group is held once.
        """
        row_index = np.asarray(batch.rows if rows is None else rows, dtype=np.int64)
        place = np.arange(len(batch)) if positions is None else np.asarray(positions, dtype=np.int64)
        if not row_index.size or not batch.names:
            return
        assert row_index.shape == place.shape, (row_index.shape, place.shape)
        with self._lock:
            number, self._next_chunk = self._next_chunk, self._next_chunk + 1
            self._chunks[number] = batch
            self._live[number] = row_index.size * len(batch.names)
            for name in batch.names:
                shelf = self._shelves.setdefault(name, _Shelf())
                shelf.reach(int(row_index.max()) + 1)
                self._release(shelf.chunk[row_index])
                shelf.chunk[row_index] = number
                shelf.position[row_index] = place

    def get(self, rows: ArrayLike | Tensor, names: Iterable[str]) -> Batch:
        """Copy the named columns of the rows, in the asked order; a missing one is a KeyError naming row and column."""
        row_index = np.asarray(rows, dtype=np.int64)
        names = list(names)
        if not row_index.size:
            return empty_batch(names)
        with self._lock:
            found = {name: self._find(name, row_index) for name in names}
            chunks = {
                number: self._chunks[number] for numbers, _ in found.values() for number in np.unique(numbers).tolist()
            }
        out = Batch(torch.from_numpy(row_index.copy()))
        for name, (numbers, positions) in found.items():
            _copy_column(_gather(name, numbers, positions, chunks), name, out)
        return out

    def drop(self, rows: ArrayLike | Tensor) -> None:
        """Forget all columns of the rows; a chunk's memory goes when its last row does. Unknown rows are ignored."""
        row_index = np.asarray(rows, dtype=np.int64)
        with self._lock:
            for shelf in self._shelves.values():
                known = row_index[(row_index >= 0) & (row_index < shelf.chunk.size)]
                self._release(shelf.chunk[known])
                shelf.chunk[known] = -1

    @property
    def num_bytes(self) -> int:
        """Bytes of all chunks that are held."""
        with self._lock:
            return sum(chunk.num_bytes() for chunk in self._chunks.values())

    def _find(self, name: str, rows: Integers) -> tuple[Integers, Integers]:
        shelf = self._shelves.get(name, _Shelf())
        inside = (rows >= 0) & (rows < shelf.chunk.size)
        numbers = np.full(rows.size, -1, dtype=np.int64)
        numbers[inside] = shelf.chunk[rows[inside]]
        missing = rows[numbers < 0]
        if missing.size:
            more = f" (and {missing.size - 1} more rows)" if missing.size > 1 else ""
            raise KeyError(f"row {missing[0]}{more} has no column {name!r} in this warehouse")
        return numbers, shelf.position[rows]

    def _release(self, numbers: Integers) -> None:
        held, counts = np.unique(numbers[numbers >= 0], return_counts=True)
        for number, count in zip(held.tolist(), counts.tolist(), strict=True):
            self._live[number] -= count
            if self._live[number] == 0:
                del self._live[number], self._chunks[number]


def _gather(name: str, numbers: Integers, positions: Integers, chunks: dict[int, Batch]) -> Batch:
    """One column's rows from their chunks, in order: chunk by chunk, then permuted if they were interleaved."""
    parts, where = [], []
    for number in np.unique(numbers).tolist():
        here = np.flatnonzero(numbers == number)
        parts.append(chunks[number].select(torch.from_numpy(positions[here]), [name]))
        where.append(here)
    joined = parts[0] if len(parts) == 1 else Batch.concatenate(parts)
    order = np.concatenate(where)
    in_order = bool((np.diff(order) > 0).all())
    return joined if in_order else joined.select(torch.from_numpy(np.argsort(order)))


def _copy_column(source: Batch, name: str, out: Batch) -> None:
    if source.is_ragged(name):
        out.put_ragged(name, source.values(name), source.offsets(name))
    else:
        out.put_dense(name, source.dense(name))
