"""A node's warehouse, as one rank of the node sees it: the payload of the rows whose home is this node.

On a node with several ranks the payload lies in shared memory that the local-rank-0 process created. Each rank writes
frames into its own part, announces their places in its journal, and reads all frames in place.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import partial

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from spmdrl.dataflow.samples.control.row_news import Stored, pack_news, unpack_news
from spmdrl.dataflow.samples.schema import columns_mask, empty_batch, names_of_mask
from spmdrl.dataflow.samples.store.frame import Arrays, OutgoingFrame, read_arrays
from spmdrl.dataflow.samples.store.journal import Journal
from spmdrl.dataflow.samples.store.shared_memory import Place, Pool
from spmdrl.dataflow.samples.store.shelves import Chunk, Placement, Shelves, collect
from spmdrl.dataflow.samples.volume import Link, Volume
from spmdrl.types import Batch


class Warehouse:
    """Stores and finds rows of this node. Thread-safe: RPC threads and the owner call it at once.

    What `get` returns may be views of stored rows: they must not be changed, and are valid until the rows are dropped.
    """

    def __init__(self, pool: Pool | None = None):
        """`pool`: the memory that the node's ranks share; None: this rank is alone on its node."""
        self._pool = pool
        self._journal = Journal(pool) if pool is not None else None
        self._lock = threading.RLock()
        self._shelves = Shelves()
        self._num_rows = 0
        """how many rows the batch has; 0 until it is opened here"""

    def begin(self, epoch: int) -> None:
        """Get ready for a new batch: messages about earlier batches are discarded."""
        with self._lock:
            self._num_rows = 0
            if self._journal is not None:
                self._journal.begin(epoch)

    def open(self, num_rows: int) -> None:
        """Start on the batch; from here on this rank reads what others announce."""
        with self._lock:
            self._num_rows = num_rows

    def put(self, batch: Batch, rows: ArrayLike | None = None, positions: ArrayLike | None = None) -> None:
        """Store rows. Tensors of the batch are taken over where no other rank needs them.

        `rows` and `positions` together store several rows at one position. Raises ValueError for a row that has one of
        the columns already.
        """
        if not len(batch) or not batch.names:
            return
        index = np.asarray(batch.rows if rows is None else rows, dtype=np.int64)
        if self._pool is None or self._journal is None:
            self.keep(batch, index, positions)
            return
        frame = OutgoingFrame(batch)
        with self._lock:
            place = self._pool.allocate(frame.num_bytes)
            frame.write(self._pool.view(place))
            where = None if positions is None else np.asarray(positions, dtype=np.int64)
            stored = Stored(index, columns_mask(batch.names), place, where)
            self._add(stored, len(batch))
            self._journal.append(pack_news([stored]))

    def keep(self, batch: Batch, rows: ArrayLike, positions: ArrayLike | None) -> None:
        """Store rows for this rank alone; the tensors are taken over."""
        with self._lock:
            self._shelves.add(Chunk(len(batch), batch.names, partial(_arrays_of, batch)), rows, positions)

    def get(self, rows: ArrayLike | Tensor, names: Iterable[str], volume: Volume | None = None) -> Batch:
        """The named columns of the rows, in the given order. Raises KeyError naming a missing row and column."""
        index = np.asarray(rows, dtype=np.int64)
        if not index.size:
            return empty_batch(names)
        with self._lock:
            self._read_journal()
            found = self._shelves.find(names, index)
        if volume is not None:
            self._count(found, volume)
        return collect(found, index)

    def drop(self, rows: ArrayLike | Tensor) -> None:
        """Forget the rows. Memory is free again when the last row of a chunk goes."""
        with self._lock:
            self._read_journal()
            self._let_go(self._shelves.drop(rows))

    def trim(self) -> None:
        """Give memory back that a larger batch needed once."""
        if self._pool is not None:
            with self._lock:
                self._pool.trim()

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
            self._shelves, self._journal = Shelves(), None
            if self._pool is not None:
                self._pool.close()

    def _read_journal(self) -> None:
        """Index what other ranks of the node stored."""
        if self._journal is None or self._pool is None or not self._num_rows:
            return
        for writer, words in self._journal.read_new():
            for entry in unpack_news(words, self._num_rows):
                if isinstance(entry, Stored) and writer != self._pool.writer:
                    self._add(entry, entry.rows.size if entry.positions is None else int(entry.positions.max()) + 1)

    def _add(self, stored: Stored, num_rows: int) -> None:
        """Index a frame of this node, which is read when a row of it is wanted first."""
        assert self._pool is not None, "only ranks that share memory have frames in it"
        memory = self._pool.view(stored.place)
        names = sorted(names_of_mask(stored.columns))
        chunk = Chunk(num_rows, names, partial(read_arrays, memory, trusted=True), stored.place)
        self._shelves.add(chunk, stored.rows, stored.positions)

    def _let_go(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            place = chunk.origin
            if self._pool is not None and isinstance(place, Place) and place.writer == self._pool.writer:
                self._pool.free(place)

    def _is_own(self, chunk: Chunk) -> bool:
        return self._pool is None or chunk.origin is None or chunk.origin.writer == self._pool.writer

    def _count(self, found: Iterable[Placement], volume: Volume) -> None:
        """Count what is read by whether this rank or another one of its node stored it."""
        for placement in found:
            own = [number for number, chunk in placement.chunks.items() if self._is_own(chunk)]
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
