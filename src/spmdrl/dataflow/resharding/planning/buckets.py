"""Pieces of weights and the buckets that they fill; integers only.

A bucket is bounded by its cost on its busiest rank, under one executor or under either.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from spmdrl.dataflow.resharding.planning.cells import Cell, cut
from spmdrl.nouns.batch import WeightSlice


@dataclass(frozen=True)
class Transfer:
    """Transfer of one piece between two ranks."""

    box: WeightSlice
    sender: int
    receiver: int


@dataclass(frozen=True)
class Piece:
    """A box that each of `holders` holds whole and each of `wanters` wants whole; a rank may be both."""

    box: WeightSlice
    holders: tuple[int, ...]
    wanters: tuple[int, ...]
    number: int
    """position in the block's order, which spreads sending over the holders"""

    @property
    def contributor(self) -> int:
        """Rank that sends this piece in an all-gather, and sums its checksum."""
        return self.holders[self.number % len(self.holders)]

    @property
    def is_missing(self) -> bool:
        """True if some rank wants it and doesn't hold it."""
        return any(rank not in self.holders for rank in self.wanters)

    def transfers(self, ranks_per_node: int) -> Iterator[Transfer]:
        """Yield a transfer to each wanter without it, from a holder on its node if possible, holders taking turns."""
        missing = [rank for rank in self.wanters if rank not in self.holders]
        for turn, receiver in enumerate(missing, start=self.number):
            node = receiver // ranks_per_node
            near = [rank for rank in self.holders if rank // ranks_per_node == node] or self.holders
            yield Transfer(self.box, near[turn % len(near)], receiver)


@dataclass(frozen=True)
class Bucket:
    """Pieces that move together through one temporary buffer."""

    pieces: tuple[Piece, ...]
    finished: tuple[str, ...]
    """weights not needed by later buckets: their source may leave the device"""
    num_bytes: int
    """temporary bytes on the busiest rank; pieces that a rank copies from itself count too"""


class BucketFilling:
    """Builder of a block's buckets, piece by piece in model order."""

    def __init__(
        self, ranks: range, bucket_bytes: int, element_bytes: Mapping[str, int], ranks_per_node: int, *, gathers: bool
    ):
        """`element_bytes` gives each weight's element size on the wire.

        Unless it `gathers`, a bucket needs no segment of each rank: with hundreds of ranks these would be tiny.
        """
        self._ranks = ranks
        self._num_segments = len(ranks) if gathers else 0
        self._limit = bucket_bytes
        self._element_bytes = element_bytes
        self._ranks_per_node = ranks_per_node
        self._num_pieces = 0
        self._pieces: list[Piece] = []
        self._load = _Load(self._num_segments)
        self._closed: list[tuple[tuple[Piece, ...], int]] = []

    def add_weight(self, cells: list[Cell]) -> None:
        """Add one weight; of one larger than a bucket, pieces from each cell in turn, so that all holders stay busy."""
        whole = _Load(self._num_segments)
        for number, cell in enumerate(cells):
            whole.add(self._load_of(self._piece(cell.box, cell, number)))
        num_parts = max(1, -(-whole.num_bytes // self._limit))
        parts = [[(part, cell) for part in cut(cell.box, num_parts)] for cell in cells]
        for turn in itertools.zip_longest(*parts):
            for part in turn:
                if part is not None:
                    self._add(*part)

    def finish(self) -> tuple[Bucket, ...]:
        self._close()
        last = {piece.box.name: index for index, (pieces, _) in enumerate(self._closed) for piece in pieces}
        finished: list[list[str]] = [[] for _ in self._closed]
        for name, index in last.items():
            finished[index].append(name)
        return tuple(
            Bucket(pieces, tuple(names), num_bytes)
            for (pieces, num_bytes), names in zip(self._closed, finished, strict=True)
        )

    def _add(self, box: WeightSlice, cell: Cell) -> None:
        piece = self._piece(box, cell, self._num_pieces)
        load = self._load_of(piece)
        if self._load.num_bytes_with(load) > self._limit:
            self._close()
        if self._load.num_bytes_with(load) > self._limit:
            self._add_halves(box, cell, needed=load.num_bytes)
            return
        self._load.add(load)
        self._pieces.append(piece)
        self._num_pieces += 1

    def _add_halves(self, box: WeightSlice, cell: Cell, *, needed: int) -> None:
        halves = cut(box, 2)
        if len(halves) == 1:
            raise ValueError(
                f"reshard.bucket_bytes is {self._limit}, but one element of {box.name} among {len(self._ranks)} ranks "
                f"needs {needed} bytes; set it to at least {needed} (64 MiB is the default)"
            )
        for half in halves:
            self._add(half, cell)

    def _close(self) -> None:
        if self._pieces:
            self._closed.append((tuple(self._pieces), self._load.num_bytes))
            self._pieces, self._load = [], _Load(self._num_segments)

    def _piece(self, box: WeightSlice, cell: Cell, number: int) -> Piece:
        return Piece(box, tuple(cell.holders), tuple(cell.wanters), number)

    def _load_of(self, piece: Piece) -> _Load:
        num_bytes = piece.box.num_elements * self._element_bytes[piece.box.name]
        load = _Load(self._num_segments)
        # A rank's copies from itself need no buffer, but count, so that a bucket stays the grain of the swap.
        load.moved = dict.fromkeys(piece.wanters, num_bytes)
        for transfer in piece.transfers(self._ranks_per_node):
            load.moved[transfer.sender] = load.moved.get(transfer.sender, 0) + num_bytes
        if piece.is_missing:
            load.contributed = {piece.contributor: num_bytes}
        return load


class _Load:
    """Temporary bytes of pieces on each rank of a block; an all-gather has so many segments, none is done with 0."""

    def __init__(self, num_segments: int):
        self._num_segments = num_segments
        self.moved: dict[int, int] = {}
        self.contributed: dict[int, int] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes on the busiest rank; an all-gather needs equal segments per rank, as large as the largest."""
        exact = max(self.moved.values(), default=0)
        return max(exact, self._num_segments * max(self.contributed.values(), default=0))

    def num_bytes_with(self, other: _Load) -> int:
        """Return `num_bytes` after a hypothetical `add(other)`."""
        exact = max((self.moved.get(rank, 0) + more for rank, more in other.moved.items()), default=0)
        segment = max((self.contributed.get(rank, 0) + more for rank, more in other.contributed.items()), default=0)
        return max(self.num_bytes, exact, self._num_segments * segment)

    def add(self, other: _Load) -> None:
        for mine, more in ((self.moved, other.moved), (self.contributed, other.contributed)):
            for rank, num_bytes in more.items():
                mine[rank] = mine.get(rank, 0) + num_bytes
