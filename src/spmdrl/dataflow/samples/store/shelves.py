"""Where each row's columns are: the index of a warehouse, and the batches that its readers get.

Rows that were stored together are a chunk. Slots number the rows of all chunks, one chunk behind the other, with an
unused slot behind each and before the first; a shelf holds the slots of all rows for the columns that are always stored
together:

    chunk 0: rows 4 5 6 7       row    0    1    2    4    5    6    7
    chunk 1: rows 2 0           slot   7    -    6    1    2    3    4

Rows with consecutive slots lie one behind the other, so each column of theirs is one slice of memory. Tables by slot
and by chunk say which: nothing is done row by row or chunk by chunk until a reader has found its slices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from spmdrl.dataflow.samples.schema import LENGTHS_OF
from spmdrl.dataflow.samples.volume import Link
from spmdrl.nouns.batch import Integers

_ABSENT = 0
_NUM_SHELVES = 8
_OFFSET_BYTES = 8
_LARGE_BYTES = 4 << 20
"""From here on NumPy asks the system for huge pages, which outweighs that it takes twice as long for short arrays."""


class Memory(Protocol):
    """Holds the values of chunks."""

    @property
    def link(self) -> Link:
        """How far it is from this rank."""

    def array(self, name: str) -> NDArray[np.generic]:
        """All that it holds, as values of the column's dtype."""


class Chunks(NamedTuple):
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


def _grown(size: int, needed: int) -> int:
    """How large a table becomes, so that all of its growing takes as long as its last."""
    return size if needed <= size else max(needed, 2 * size)


class _Table:
    """Integers that grow at their end; what was written stays where it is for those who have a view of it."""

    def __init__(self) -> None:
        self.values: Integers = np.zeros(0, dtype=np.int64)

    def write(self, start: int, stop: int, values: ArrayLike) -> None:
        if stop > self.values.size:
            grown = np.zeros(max(_grown(self.values.size, stop), 1024), dtype=np.int64)
            grown[: self.values.size] = self.values
            self.values = grown
        self.values[start:stop] = values


class _Search(NamedTuple):
    """Where columns are looked for."""

    groups: list[list[str]]
    """columns that are on the same shelves"""
    shelves: Integers
    """of each group one behind the other [K, 1]"""
    firsts: list[int]
    """which of these is the first of each group"""


class Shelves:
    """Finds rows in chunks. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.memories: list[Memory] = []
        """of each chunk"""
        self.chunk_of_slot = _Table()
        self.bounds = defaultdict[str, _Table](_Table)
        """by the column that lengths are announced under, by slot: where a row's values begin among its chunk's"""
        self.starts = defaultdict[str, _Table](_Table)
        """by column and chunk, where its values begin in memory; of a dense column, where those of slot 0 would"""
        self._num_slots = 1
        self._shelves: dict[tuple[str, ...], int] = {}
        """the shelf of columns that are stored together"""
        self._slots: Integers = np.zeros((_NUM_SHELVES, 0), dtype=np.int64)
        """by shelf and row"""
        self._searches: dict[tuple[str, ...], _Search] = {}
        """of the columns that were looked for since the last shelf was added"""

    def add(self, chunks: Chunks, rows: ArrayLike, positions: ArrayLike | None = None) -> None:
        """Add chunks. Raises ValueError for a row that has one of their columns already.

        `rows` are the rows at each position, or with `positions` those at these, of which several may be equal.
        """
        index, names = np.asarray(rows, dtype=np.int64), chunks.names
        last = int(index.max())
        self._refuse_known(names, index, last)
        shelf = self._shelf_with_room(names, last + 1)
        first_slot, first_chunk, sizes = self._num_slots, len(self.memories), chunks.sizes
        num_chunks, num_rows = len(sizes), sum(sizes.tolist())
        stop = first_slot + num_rows + num_chunks
        slots = np.arange(first_slot, first_slot + num_rows)
        chunk_starts: int | Integers = first_slot
        numbers: int | Integers = first_chunk
        if num_chunks > 1:
            within = np.arange(num_chunks)
            slots += within.repeat(sizes)
            chunk_starts = first_slot + within + sizes.cumsum() - sizes
            numbers = (first_chunk + within).repeat(sizes + 1)
        self.chunk_of_slot.write(first_slot, stop, numbers)
        for key, bounds in chunks.bounds.items():
            self.bounds[key].write(first_slot, stop, bounds)
        for name, starts in chunks.starts.items():
            own = starts if LENGTHS_OF[name] else starts - chunk_starts
            self.starts[name].write(first_chunk, first_chunk + num_chunks, own)
        self._slots[shelf][index] = slots if positions is None else slots[np.asarray(positions, dtype=np.int64)]
        self.memories += chunks.memories
        self.num_bytes += chunks.num_bytes
        self._num_slots = stop

    def find(self, names: Iterable[str], rows: Integers) -> list[Run | RepeatedRun | Pieces]:
        """Where the rows lie, for columns that lie alike. Raises KeyError naming row and column if one is missing."""
        search = self._search_for(tuple(names), rows)
        if not search.groups:
            return []
        found = self._slots_of(search, rows)
        steps = found[:, 1:] - found[:, :-1]
        are_runs, firsts = (steps == 1).all(axis=1).tolist(), found[:, 0].tolist()
        placements: list[Run | RepeatedRun | Pieces] = []
        for number, group in enumerate(search.groups):
            if are_runs[number] and firsts[number] != _ABSENT:
                placements.append(Run(self, group, firsts[number], rows.size))
                continue
            slots = found[number]
            _refuse_missing(group[0], rows, slots)
            breaks = np.flatnonzero(steps[number] != 1)
            is_repeated = not np.count_nonzero(steps[number][breaks])
            placements.append(RepeatedRun(self, group, slots) if is_repeated else Pieces(self, group, slots, breaks))
        return placements

    def _slots_of(self, search: _Search, rows: Integers) -> Integers:
        """The slot of each row, by group [groups, B]."""
        slots, num_known = self._slots, self._slots.shape[1]
        # A number below 0 is a very large one without sign, so that one look at all of them finds both kinds.
        is_within = rows.view(np.uint64).max() < num_known
        index = rows if is_within else rows.clip(0, num_known - 1)
        found = slots.take(search.shelves * num_known + index)
        if len(found) > len(search.groups):
            # A row is on one of the shelves, and absent, so 0, on all others.
            found = np.maximum.reduceat(found, search.firsts)
        if not is_within:
            found[:, rows != index] = _ABSENT
        return found

    def _search_for(self, names: tuple[str, ...], rows: Integers) -> _Search:
        """Where to look for columns. Raises KeyError naming one that none of the rows has."""
        if names in self._searches:
            return self._searches[names]
        alike: dict[tuple[int, ...], list[str]] = {}
        for name in names:
            shelves = tuple([shelf for key, shelf in self._shelves.items() if name in key])
            if not shelves:
                _refuse_missing(name, rows, np.full(rows.size, _ABSENT))
            alike.setdefault(shelves, []).append(name)
        firsts = list(accumulate(map(len, alike), initial=0))[:-1]
        numbers = np.array([*chain.from_iterable(alike)], dtype=np.int64).reshape(-1, 1)
        self._searches[names] = search = _Search([*alike.values()], numbers, firsts)
        return search

    def _refuse_known(self, names: tuple[str, ...], rows: Integers, last: int) -> None:
        """Raise ValueError for a row that has one of these columns; `last` is the largest of the rows."""
        wanted, num_known = set(names), self._slots.shape[1]
        for key, shelf in self._shelves.items():
            if wanted.isdisjoint(key):
                continue
            index = rows if last < num_known else rows[rows < num_known]
            slots = self._slots[shelf].take(index)
            if np.count_nonzero(slots):
                row, both = index[slots != _ABSENT][0], min(wanted.intersection(key))
                raise ValueError(f"row {row} has column {both!r} already; each column is stored once")

    def _shelf_with_room(self, names: tuple[str, ...], num_rows: int) -> int:
        """The shelf of these columns, with room for so many rows."""
        num_shelves, num_known = self._slots.shape
        shelf = self._shelves.get(names)
        if shelf is None:
            shelf = self._shelves[names] = len(self._shelves)
            self._searches.clear()
        if shelf >= num_shelves or num_rows > num_known:
            grown = np.zeros((_grown(num_shelves, shelf + 1), _grown(num_known, num_rows)), dtype=np.int64)
            grown[:num_shelves, :num_known] = self._slots
            self._slots = grown
        return shelf


def _refuse_missing(name: str, rows: Integers, slots: Integers) -> None:
    """Raise KeyError for rows that have no slot."""
    missing = rows[slots == _ABSENT]
    if missing.size:
        if missing.min() < 0:
            raise KeyError(f"row {missing.min()} is in no warehouse: rows count from 0")
        more = f" (and {missing.size - 1} more rows)" if missing.size > 1 else ""
        raise KeyError(f"row {missing[0]}{more} has no column {name!r} in this warehouse")


class GatheredColumns:
    """The columns of some rows as they are put together."""

    def __init__(self) -> None:
        self.columns: dict[str, Tensor] = {}
        self.offsets: dict[str, Tensor] = {}
        self.num_bytes: dict[Link, dict[str, int]] = {}
        """of each column, one offset per row included, by where its rows lie"""

    def counted(self, link: Link) -> dict[str, int]:
        """The bytes that lie there."""
        return self.num_bytes.setdefault(link, {})


class Run:
    """Rows that lie one behind the other, for columns that lie alike: each column of theirs is one slice of memory."""

    def __init__(self, shelves: Shelves, names: list[str], first: int, num_rows: int):
        """`first` is the slot of the first row."""
        self.names = names
        self._chunk = shelves.chunk_of_slot.values.item(first)
        self.memory = shelves.memories[self._chunk]
        self._shelves = shelves
        self._first = first
        self._num_rows = num_rows

    def gather(self, into: GatheredColumns) -> None:
        """Add views of the columns. Those with the same row lengths share their offsets."""
        counted, offset_bytes = into.counted(self.memory.link), self._num_rows * _OFFSET_BYTES
        shared: dict[str, tuple[Integers, Tensor]] = {}
        for name in self.names:
            lengths = LENGTHS_OF[name]
            if lengths is None:
                values = self.dense(name)
                counted[name] = values.nbytes
            else:
                if lengths not in shared:
                    bounds = self.bounds(lengths)
                    low = bounds.item(0)
                    shared[lengths] = bounds, torch.from_numpy(bounds - low if low else bounds)
                bounds, into.offsets[name] = shared[lengths]
                values = self.ragged(name, bounds)
                counted[name] = values.nbytes + offset_bytes
            into.columns[name] = torch.from_numpy(values)

    def dense(self, name: str) -> NDArray[np.generic]:
        start = self._shelves.starts[name].values.item(self._chunk) + self._first
        return self.memory.array(name)[start : start + self._num_rows]

    def ragged(self, name: str, bounds: Integers) -> NDArray[np.generic]:
        start = self._shelves.starts[name].values.item(self._chunk)
        return self.memory.array(name)[start + bounds.item(0) : start + bounds.item(self._num_rows)]

    def bounds(self, lengths: str) -> Integers:
        """Where each row's values begin among those of its chunk, and the last one's end [num_rows + 1]."""
        return self._shelves.bounds[lengths].values[self._first : self._first + self._num_rows + 1]


class RepeatedRun:
    """A run of which some rows come several times, one after the other, as the prompt of a group does.

    Each column of theirs is put together in memory of its own.
    """

    def __init__(self, shelves: Shelves, names: list[str], slots: Integers):
        first = slots.item(0)
        self._run = Run(shelves, names, first, slots.item(-1) + 1 - first)
        self._repeats = np.bincount(slots - first)
        self._num_rows = slots.size

    def gather(self, into: GatheredColumns) -> None:
        """Add copies of the columns."""
        run, repeats = self._run, self._repeats
        counted = into.counted(run.memory.link)
        for name in run.names:
            lengths = LENGTHS_OF[name]
            if lengths is None:
                values = run.dense(name).repeat(repeats)
                counted[name] = values.nbytes
            else:
                bounds = run.bounds(lengths)
                into.offsets[name] = torch.from_numpy(_offsets((bounds[1:] - bounds[:-1]).repeat(repeats)))
                values = _repeated(run.ragged(name, bounds), bounds, repeats)
                counted[name] = values.nbytes + self._num_rows * _OFFSET_BYTES
            into.columns[name] = torch.from_numpy(values)


class Pieces:
    """Rows that lie apart, for columns that lie alike: each column of theirs is put together in memory of its own."""

    def __init__(self, shelves: Shelves, names: list[str], slots: Integers, breaks: Integers):
        """`breaks` are the rows behind which the next one lies elsewhere."""
        self._shelves = shelves
        self._names = names
        self._slots = slots
        self._firsts = slots[np.concatenate([[0], breaks + 1])]
        self._ends = slots[np.concatenate([breaks, [-1]])] + 1
        self._chunks = shelves.chunk_of_slot.values[self._firsts]
        memories = [shelves.memories[chunk] for chunk in self._chunks.tolist()]
        numbers = {memory: number for number, memory in enumerate(dict.fromkeys(memories))}
        self._memories = [*numbers]
        self._memory_of_piece = [numbers[memory] for memory in memories]

    def gather(self, into: GatheredColumns) -> None:
        """Add copies of the columns. Those with the same row lengths share their offsets."""
        shared: dict[str, tuple[Integers, Tensor]] = {}
        for name in self._names:
            lengths = LENGTHS_OF[name]
            lengths_B = np.ones(self._slots.size, dtype=np.int64)
            if lengths is not None:
                if lengths not in shared:
                    bounds = self._shelves.bounds[lengths].values
                    lengths_B = bounds[self._slots + 1] - bounds[self._slots]
                    shared[lengths] = lengths_B, torch.from_numpy(_offsets(lengths_B))
                lengths_B, into.offsets[name] = shared[lengths]
            values = self._values(name, lengths)
            into.columns[name] = torch.from_numpy(values)
            row_bytes_B = values.itemsize * lengths_B + (0 if lengths is None else _OFFSET_BYTES)
            for link, num_bytes in self._bytes_by_link(row_bytes_B).items():
                into.counted(link)[name] = num_bytes

    def _values(self, name: str, lengths: str | None) -> NDArray[np.generic]:
        firsts, ends = self._firsts, self._ends
        if lengths is not None:
            bounds = self._shelves.bounds[lengths].values
            firsts, ends = bounds[firsts], bounds[ends]
        starts = self._shelves.starts[name].values[self._chunks]
        arrays = [memory.array(name) for memory in self._memories]
        views = [array.data for array in arrays]
        spans = zip(self._memory_of_piece, (starts + firsts).tolist(), (starts + ends).tolist(), strict=True)
        pieces, dtype = [views[memory][start:end] for memory, start, end in spans], arrays[0].dtype
        return _joined(pieces, int((ends - firsts).sum()) * dtype.itemsize, dtype)

    def _bytes_by_link(self, row_bytes_B: Integers) -> dict[Link, int]:
        if len(self._memories) == 1:
            return {self._memories[0].link: int(row_bytes_B.sum())}
        num_bytes = dict.fromkeys([memory.link for memory in self._memories], 0)
        memory_of_row = np.repeat(self._memory_of_piece, self._ends - self._firsts)
        for memory, those_there in zip(self._memories, np.bincount(memory_of_row, row_bytes_B).tolist(), strict=True):
            num_bytes[memory.link] += int(those_there)
        return num_bytes


def _offsets(lengths_B: Integers) -> Integers:
    out = np.zeros(lengths_B.size + 1, dtype=np.int64)
    lengths_B.cumsum(out=out[1:])
    return out


def _repeated(values: NDArray[np.generic], bounds: Integers, repeats_B: Integers) -> NDArray[np.generic]:
    """The packed values of rows that follow each other as often as said; the first one begins at bounds[0]."""
    memory, begins, pieces = values.data, (bounds - bounds[0]).tolist(), list[memoryview]()
    for (start, stop), repeats in zip(pairwise(begins), repeats_B.tolist(), strict=True):
        pieces += [memory[start:stop]] * repeats
    return _joined(pieces, sum(map(len, pieces)) * values.itemsize, values.dtype)


def _joined(pieces: list[memoryview], num_bytes: int, dtype: np.dtype[Any]) -> NDArray[np.generic]:
    """The pieces, `num_bytes` in all, one behind the other in memory of their own."""
    if num_bytes >= _LARGE_BYTES:
        return np.concatenate([np.frombuffer(piece, dtype) for piece in pieces])
    return np.frombuffer(bytearray().join(pieces), dtype)


def collect(found: Iterable[Run | RepeatedRun | Pieces]) -> GatheredColumns:
    """The columns of some rows: views where the rows lie one behind the other in one chunk, else one copy."""
    out = GatheredColumns()
    for placement in found:
        placement.gather(out)
    return out
