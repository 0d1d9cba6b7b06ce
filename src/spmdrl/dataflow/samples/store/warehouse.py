"""A rank's view of its node's warehouse: the payload of rows whose home is this node.

On a node with several ranks the payload lies in shared memory created by local rank 0. Each rank writes columns into
its own file and reads all files in place; the next commit brings the places of the others' columns.

Rows that were stored together are a chunk. A slot is a chunk's number and a position in it, so that rows with
consecutive slots are adjacent and each of their columns is one slice of memory. A shelf has each row's slot for columns
that are always stored together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from spmdrl.dataflow.samples.catalogue import Catalogue, RowMetadata
from spmdrl.dataflow.samples.schema import LENGTHS_OF, empty_batch, length_column, names_of_mask, rule_of
from spmdrl.dataflow.samples.store.frame import ALIGNMENT, NUMPY_DTYPES, CheckedColumns, values_of
from spmdrl.dataflow.samples.store.shared_memory import Place, Pool
from spmdrl.dataflow.samples.volume import Link, Volume, column_bytes
from spmdrl.nouns.batch import Batch, Integers, offsets_of

_ABSENT = -1
_POSITION_BITS = 32
_POSITIONS = (1 << _POSITION_BITS) - 1
_OFFSET_BYTES = 8


class Chunk(NamedTuple):
    """Rows that were stored together."""

    num_rows: int
    memory: _File | _Kept
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
        gathered = GatheredColumns()
        for one in found:
            one.gather(gathered)
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
