"""A rank's view of its node's warehouse: the payload of rows whose home is this node.

On a node with several ranks the payload lies in shared memory created by local rank 0. Each rank writes columns into
its own file and reads all files in place; the next commit brings the places of the others' columns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from spmdrl.dataflow.samples.catalogue import Catalogue, RowMetadata
from spmdrl.dataflow.samples.schema import empty_batch, length_column, names_of_mask, rule_of
from spmdrl.dataflow.samples.store.frame import ALIGNMENT, NUMPY_DTYPES, CheckedColumns, values_of
from spmdrl.dataflow.samples.store.shared_memory import Place, Pool
from spmdrl.dataflow.samples.store.shelves import Chunk, Shelves, collect
from spmdrl.dataflow.samples.volume import Link, Volume, column_bytes
from spmdrl.nouns.batch import Batch, Integers, offsets_of

_OFFSET_BYTES = 8


class Warehouse:
    """Store of this node's rows. Thread-safe: RPC threads and the owner call it concurrently.

    `get` may return views of stored rows: they must not be changed, and are valid until `clear`.
    """

    def __init__(self, pool: Pool | None = None):
        """`pool` is the node's shared memory; None: this rank is alone on its node."""
        self._pool = pool
        self._files = [] if pool is None else [_File(pool, writer) for writer in range(pool.num_writers)]
        self._lock = threading.RLock()
        self._shelves = Shelves()

    def put(self, batch: Batch) -> Place | None:
        """Store rows; returns their place in the node's memory. A rank alone on its node keeps the tensors.

        Raises ValueError for a row that already has one of the columns, or columns that break the schema.
        """
        if not len(batch) or not batch.names:
            return None
        if self._pool is None:
            self.keep(batch)
            return None
        columns = CheckedColumns(batch)
        sizes = {name: column.size for name, column in columns.values.items()}
        starts, num_bytes = values_of(sizes, sizes, 0)
        with self._lock:
            place = self._pool.allocate(max(num_bytes, ALIGNMENT))
            file = self._files[place.writer]
            for name, column in columns.values.items():
                starts[name] += place.start // column.itemsize
                file.array(name)[starts[name] : starts[name] + column.size] = column
            # Copied, because offsets may be a view of a whole frame.
            bounds = {key: offsets.copy() for key, offsets in columns.offsets.items()}
            self._add(batch, file, starts, bounds)
        return place

    def keep(self, batch: Batch, rows: ArrayLike | None = None, positions: ArrayLike | None = None) -> None:
        """Store rows for this rank alone; the tensors are taken over.

        `rows` and `positions` together store several rows at one position.
        """
        index = batch.rows.numpy() if rows is None else np.asarray(rows, dtype=np.int64)
        if not index.size:
            return
        bounds = {length_column(name): batch.offsets(name).numpy() for name in batch.names if batch.is_ragged(name)}
        with self._lock:
            self._add(batch, _Kept(batch), dict.fromkeys(batch.names, 0), bounds, index, positions)

    def add_stored(self, metadata: RowMetadata, is_here: NDArray[np.bool_], lengths: Callable[[str], Integers]) -> None:
        """Index columns that other ranks of this node stored.

        `is_here` [num_rows] marks rows that live on this node; `lengths` returns the row lengths [num_rows] of a ragged
        column. Raises ValueError for places that can't hold these columns.
        """
        if self._pool is None or not len(metadata.places):
            return
        writers, _, _, sizes = metadata.places.T
        wanted = is_here[metadata.rows[sizes.cumsum() - sizes]] & (writers != self._pool.writer)
        if not wanted.any():
            return
        rows = metadata.rows[wanted.repeat(sizes)]
        names = names_of_mask(metadata.columns)
        chunks = self._chunks_at(metadata.places[wanted], names, rows, lengths)
        with self._lock:
            self._shelves.add(tuple(sorted(names)), chunks, rows)

    def get(self, rows: ArrayLike | Tensor, names: Iterable[str], volume: Volume | None = None) -> Batch:
        """Return the named columns of the rows, in this order. Raises KeyError, naming a missing row and column."""
        index = np.asarray(rows, dtype=np.int64)
        if not index.size:
            return empty_batch(names)
        with self._lock:
            found = self._shelves.find(names, index)
        gathered = collect(found)
        if volume is not None:
            for link, num_bytes in gathered.num_bytes.items():
                volume.count_get(link, num_bytes)
        return Batch(torch.from_numpy(index.copy()), gathered.columns, gathered.offsets)

    def clear(self) -> None:
        """Forget all rows; memory beyond this batch's needs returns to the system."""
        with self._lock:
            self._shelves = Shelves()
            if self._pool is not None:
                self._pool.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows held and indexed here."""
        with self._lock:
            return self._shelves.num_bytes

    @property
    def held_bytes(self) -> int:
        """Memory of this rank's rows, with freed pages kept for the next batch."""
        return self.num_bytes if self._pool is None else self._pool.held_bytes

    def close(self) -> None:
        with self._lock:
            self._shelves = Shelves()
            self._files = []
            if self._pool is not None:
                self._pool.close()

    def _add(
        self, batch: Batch, memory: _File | _Kept, starts: Mapping[str, int], bounds: Mapping[str, Integers],
        rows: Integers | None = None, positions: ArrayLike | None = None,
    ) -> None:  # fmt: skip
        """Index a batch that this rank stored."""
        chunk = Chunk(len(batch), memory, starts, bounds, batch.num_bytes())
        self._shelves.add(tuple(batch.names), [chunk], batch.rows.numpy() if rows is None else rows, positions)

    def _chunks_at(
        self, places: Integers, names: list[str], rows: Integers, lengths: Callable[[str], Integers]
    ) -> list[Chunk]:
        """Return the chunks at these places [chunks, 4], which hold these rows in order."""
        assert self._pool is not None, "only ranks that share memory have places in it"
        self._pool.check(places)
        key_of = {name: length_column(name) for name in names if rule_of(name).column.ragged}
        lengths_of = {key: torch.from_numpy(lengths(key)[rows]) for key in key_of.values()}
        chunks, first = [], 0
        for writer, begin, num_bytes, size in places.tolist():
            bounds = {key: offsets_of(of_rows[first : first + size]).numpy() for key, of_rows in lengths_of.items()}
            num_values = {name: bounds[key_of[name]].item(-1) if name in key_of else size for name in names}
            starts, end = values_of(names, num_values, begin)
            if max(end - begin, ALIGNMENT) != num_bytes:
                raise ValueError(
                    f"columns {names} of rows {rows[first : first + 4].tolist()}... take {end - begin} bytes, but "
                    f"their place has {num_bytes}; do all ranks run the same version?"
                )
            held = sum(num_values[name] * NUMPY_DTYPES[name].itemsize for name in names)
            held += len(key_of) * (size + 1) * _OFFSET_BYTES
            chunks.append(Chunk(size, self._files[writer], starts, bounds, held))
            first += size
        return chunks


class _File:
    """A rank's file in the node's memory."""

    def __init__(self, pool: Pool, writer: int):
        self.link = Link.PROCESS if writer == pool.writer else Link.NODE
        self._pool = pool
        self._writer = writer
        self._arrays: dict[str, NDArray[np.generic]] = {}

    def array(self, name: str) -> NDArray[np.generic]:
        if name not in self._arrays:
            self._arrays[name] = self._pool.array(self._writer, NUMPY_DTYPES[name])
        return self._arrays[name]


class _Kept:
    """A batch kept as it is."""

    link = Link.PROCESS

    def __init__(self, batch: Batch):
        tensors = {name: batch.values(name) if batch.is_ragged(name) else batch.dense(name) for name in batch.names}
        self._arrays = {name: tensor.numpy() for name, tensor in tensors.items()}

    def array(self, name: str) -> NDArray[np.generic]:
        return self._arrays[name]


class OneNode:
    """Payload of a job on one node: all rows are in its warehouse."""

    def __init__(self, warehouse: Warehouse, volume: Volume):
        self._warehouse = warehouse
        self._volume = volume

    def put(self, batch: Batch, _: Catalogue) -> list[tuple[Batch, Place | None]]:
        self._volume.count_put(Link.PROCESS, column_bytes(batch))
        return [(batch, self._warehouse.put(batch))]

    def get(self, rows: Integers, names: list[str], _: Catalogue) -> Batch:
        return self._warehouse.get(rows, names, self._volume)

    def exchange(self, own: Integers, _: Mapping[int, Integers], names: list[str], catalogue: Catalogue) -> Batch:
        return self.get(own, names, catalogue)

    def leave(self, *, graceful: bool) -> None:
        self._warehouse.close()
