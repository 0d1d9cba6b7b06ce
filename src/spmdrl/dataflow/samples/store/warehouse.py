"""A node's warehouse, as one rank of the node sees it: the payload of the rows whose home is this node.

On a node with several ranks the payload lies in shared memory that the local-rank-0 process created. Each rank writes
frames into its own file and reads all files in place; the next commit brings it the places of the others' frames.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from spmdrl.dataflow.samples.control.catalogue import Catalogue, RowMetadata
from spmdrl.dataflow.samples.schema import empty_batch, names_of_mask
from spmdrl.dataflow.samples.store.frame import Arrays, OutgoingFrame, read_arrays
from spmdrl.dataflow.samples.store.shared_memory import Place, Pool
from spmdrl.dataflow.samples.store.shelves import Chunk, Placement, Shelves, collect
from spmdrl.dataflow.samples.volume import Link, Volume, column_bytes
from spmdrl.types import Batch, Integers


class Warehouse:
    """Stores and finds rows of this node. Thread-safe: RPC threads and the owner call it at once.

    What `get` returns may be views of stored rows: they must not be changed, and are valid until `clear`.
    """

    def __init__(self, pool: Pool | None = None):
        """`pool`: the memory that the node's ranks share; None: this rank is alone on its node."""
        self._pool = pool
        self._lock = threading.RLock()
        self._shelves = Shelves()

    def put(self, batch: Batch) -> Place | None:
        """Store rows; returns where in the node's memory. A rank alone on its node keeps the tensors as they are.

        Raises ValueError for a row that has one of the columns already.
        """
        if not len(batch) or not batch.names:
            return None
        if self._pool is None:
            self.keep(batch)
            return None
        frame = OutgoingFrame(batch)
        with self._lock:
            place = self._pool.allocate(frame.num_bytes)
            frame.write(self._pool.view(place))
            self._add(place, batch.rows, batch.names)
        return place

    def keep(self, batch: Batch, rows: ArrayLike | None = None, positions: ArrayLike | None = None) -> None:
        """Store rows for this rank alone; the tensors are taken over.

        `rows` and `positions` together store several rows at one position.
        """
        index = np.asarray(batch.rows if rows is None else rows, dtype=np.int64)
        if index.size:
            with self._lock:
                self._shelves.add(Chunk(len(batch), batch.names, partial(_arrays_of, batch)), index, positions)

    def add_frames(self, metadata: RowMetadata, is_here: NDArray[np.bool_]) -> None:
        """Index what other ranks of this node stored; `is_here` [num_rows] marks the rows that live on this node."""
        if self._pool is None or not len(metadata.places):
            return
        ends = metadata.places[:, 3].cumsum()
        starts = ends - metadata.places[:, 3]
        wanted = is_here[metadata.rows[starts]] & (metadata.places[:, 0] != self._pool.writer)
        names = names_of_mask(metadata.columns)
        with self._lock:
            for at in np.flatnonzero(wanted).tolist():
                place = Place(*metadata.places[at, :3].tolist())
                self._add(place, metadata.rows[starts[at] : ends[at]], names)

    def get(self, rows: ArrayLike | Tensor, names: Iterable[str], volume: Volume | None = None) -> Batch:
        """The named columns of the rows, in the given order. Raises KeyError naming a missing row and column."""
        index = np.asarray(rows, dtype=np.int64)
        if not index.size:
            return empty_batch(names)
        with self._lock:
            found = self._shelves.find(names, index)
        if volume is not None:
            _count(found, volume)
        return collect(found, index)

    def clear(self) -> None:
        """Forget all rows; memory that a larger batch needed once returns to the system."""
        with self._lock:
            self._shelves = Shelves()
            if self._pool is not None:
                self._pool.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows that are held and indexed here."""
        with self._lock:
            return sum(chunk.num_bytes for chunk in self._shelves.chunks)

    @property
    def held_bytes(self) -> int:
        """What this rank's rows take of the machine's memory, freed pages that are kept for the next batch included."""
        return self.num_bytes if self._pool is None else self._pool.held_bytes

    def close(self) -> None:
        with self._lock:
            self._shelves = Shelves()
            if self._pool is not None:
                self._pool.close()

    def _add(self, place: Place, rows: ArrayLike, names: Iterable[str]) -> None:
        """Index a frame of this node, which is read when a row of it is wanted first."""
        assert self._pool is not None, "only ranks that share memory have frames in it"
        read = partial(read_arrays, self._pool.view(place), trusted=True)
        is_own = place.writer == self._pool.writer
        self._shelves.add(Chunk(len(np.asarray(rows)), sorted(names), read, is_own=is_own), rows)


class OneNode:
    """The payload of a job on one node: all rows are in its warehouse."""

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


def _count(found: Iterable[Placement], volume: Volume) -> None:
    """Count what is read by whether this rank or another one of its node stored it."""
    for placement in found:
        own = [number for number, chunk in placement.chunks.items() if chunk.is_own]
        if len(own) in (0, len(placement.chunks)):
            volume.count_get(Link.PROCESS if own else Link.NODE, placement.num_bytes())
            continue
        is_own = np.isin(placement.numbers, own)
        volume.count_get(Link.PROCESS, placement.num_bytes(is_own))
        volume.count_get(Link.NODE, placement.num_bytes(~is_own))


def _arrays_of(batch: Batch) -> Arrays:
    """The arrays of a batch that is kept as it is."""
    offsets = {name: batch.offsets(name).numpy() for name in batch.names if batch.is_ragged(name)}
    values = {name: (batch.values(name) if name in offsets else batch.dense(name)).numpy() for name in batch.names}
    return Arrays(batch.rows.numpy(), values, offsets)
