"""A node's warehouse, as one rank of the node sees it: the payload of the rows whose home is this node.

On a node with several ranks the payload lies in shared memory that the local-rank-0 process created. Each rank writes
frames into its own part, tells the others where in its journal, and reads everybody's frames in place.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from spmdrl.dataflow.samples.frame import bytes_of_batch, read_frame, write_frame
from spmdrl.dataflow.samples.journal import Journal
from spmdrl.dataflow.samples.metadata import News, Stored, pack_news, unpack_news
from spmdrl.dataflow.samples.pool import Place, Pool
from spmdrl.dataflow.samples.schema import columns_mask, empty_batch
from spmdrl.dataflow.samples.shelves import Chunk, Found, Shelves, collect
from spmdrl.dataflow.samples.volume import Link, Volume, column_bytes
from spmdrl.types import Batch

Integers = NDArray[np.int64]


class Warehouse:
    """Stores and finds rows of this node. Thread-safe: RPC threads and the owner call it at once.

    What `get` returns may be views of stored rows: nobody may change them, and they hold until the rows are dropped.
    """

    def __init__(self, pool: Pool | None = None):
        """`pool`: the memory that the node's ranks share; None: this rank is alone on its node."""
        self._pool = pool
        self._journal = Journal(pool) if pool is not None else None
        self._lock = threading.RLock()
        self._shelves = Shelves()
        self._news: list[News] = []
        self._epoch = 0
        self.num_rows = 0
        """how many rows the batch has; 0 until it is opened here"""

    @property
    def epoch(self) -> int:
        """Which batch's rows are stored: the number that `begin` was given."""
        return self._epoch

    def begin(self, epoch: int) -> None:
        """Get ready for a new batch: what others of the node told of an earlier one is no longer heard."""
        with self._lock:
            self._epoch, self.num_rows = epoch, 0
            self._news.clear()
            if self._journal is not None:
                self._journal.begin(epoch)

    def open(self, num_rows: int) -> None:
        """Start on the batch; from here on this rank hears what others of the node tell."""
        self.num_rows = num_rows

    def put(self, batch: Batch, rows: ArrayLike | None = None, positions: ArrayLike | None = None) -> None:
        """Store rows; tensors of the batch are taken over where no other rank needs them, and may not change then.

        `rows` and `positions` together store several rows at one position.
        """
        if not len(batch) or not batch.names:
            return
        with self._lock:
            if self._pool is None or self._journal is None:
                self._let_go(self._shelves.add(Chunk(batch), rows, positions))
                return
            place = self._pool.allocate(bytes_of_batch(batch))
            memory = self._pool.view(place)
            write_frame(batch, memory)
            self._let_go(self._shelves.add(Chunk(read_frame(memory, trusted=True), place), rows, positions))
            index = np.asarray(batch.rows if rows is None else rows, dtype=np.int64)
            where = None if positions is None else np.asarray(positions, dtype=np.int64)
            self._journal.append(pack_news([Stored(index, columns_mask(batch.names), place, where)]))

    def keep(self, batch: Batch, rows: ArrayLike, positions: ArrayLike) -> None:
        """Store what every rank of the node has anyway, for this rank's own use."""
        with self._lock:
            self._shelves.add(Chunk(batch), rows, positions)

    def tell(self, news: Sequence[News]) -> None:
        """Let the node's ranks know at once."""
        with self._lock:
            if self._journal is None:
                self._news += news
            else:
                self._journal.append(pack_news(news))

    def heard(self, start: int) -> list[News]:
        """What was told on this node since the batch began, from number `start` on, this rank's own included."""
        with self._lock:
            self._listen()
            return self._news[start:]

    def get(self, rows: ArrayLike | Tensor, names: Iterable[str], volume: Volume | None = None) -> Batch:
        """The named columns of the rows, in the asked order; a missing one is a KeyError naming row and column."""
        index = np.asarray(rows, dtype=np.int64)
        if not index.size:
            return empty_batch(names)
        with self._lock:
            self._listen()
            found = {name: self._shelves.find(name, index) for name in names}
        batch = collect(found, index)
        if volume is not None:
            self._count(found, batch, volume)
        return batch

    def rows_with(self, name: str) -> Integers:
        """Which rows have the column here, ascending."""
        with self._lock:
            self._listen()
            return self._shelves.rows_with(name)

    def drop(self, rows: ArrayLike | Tensor) -> None:
        """Forget the rows. Memory is free again when the last row of a chunk goes."""
        with self._lock:
            self._listen()
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
            return sum(chunk.batch.num_bytes() for chunk in self._shelves.chunks)

    @property
    def held_bytes(self) -> int:
        """What this rank's rows take of the machine's memory, freed pages that are kept for the next batch included."""
        return self.num_bytes if self._pool is None else self._pool.held_bytes

    def close(self) -> None:
        with self._lock:
            self._shelves, self._journal = Shelves(), None
            if self._pool is not None:
                self._pool.close()

    def _listen(self) -> None:
        """Index what other ranks of the node stored, and remember what they told."""
        if self._journal is None or self._pool is None or not self.num_rows:
            return
        for writer, words in self._journal.read_new():
            for entry in unpack_news(words, self.num_rows):
                if not isinstance(entry, Stored):
                    self._news.append(entry)
                elif writer != self._pool.writer:
                    memory = self._pool.view(Place(*entry.place))
                    self._shelves.add(Chunk(read_frame(memory, trusted=True), entry.place), entry.rows, entry.positions)

    def _let_go(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            place = chunk.origin
            if self._pool is not None and isinstance(place, Place) and place.writer == self._pool.writer:
                self._pool.free(place)

    def _link_of(self, chunk: Chunk) -> Link:
        is_own = self._pool is None or chunk.origin is None or chunk.origin.writer == self._pool.writer
        return Link.PROCESS if is_own else Link.NODE

    def _count(self, found_by_name: dict[str, Found], batch: Batch, volume: Volume) -> None:
        """Count what was read by whether this rank or another one of its node stored it."""
        by_link: dict[Link, dict[str, int]] = {}
        sizes = column_bytes(batch)
        for name, found in found_by_name.items():
            links = {number: self._link_of(chunk) for number, chunk in found.chunks.items()}
            if len(set(links.values())) == 1:
                by_link.setdefault(next(iter(links.values())), {})[name] = sizes[name]
                continue
            is_own = np.array([links[number] is Link.PROCESS for number in found.numbers.tolist()])
            for link, here in ((Link.PROCESS, is_own), (Link.NODE, ~is_own)):
                by_link.setdefault(link, {})[name] = bytes_of_rows(batch, name, here)
        for link, bytes_by_column in by_link.items():
            volume.count_get(link, bytes_by_column)


def bytes_of_rows(batch: Batch, name: str, mask_B: NDArray[np.bool_]) -> int:
    """Bytes of one column in some of the rows, one offset a row included."""
    if not batch.is_ragged(name):
        return int(mask_B.sum()) * batch.dense(name).element_size()
    offsets = batch.offsets(name)
    num_values = int(np.diff(offsets.numpy())[mask_B].sum())
    return num_values * batch.values(name).element_size() + int(mask_B.sum()) * offsets.element_size()
