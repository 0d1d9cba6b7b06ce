"""The resharding plan: senders, receivers and buckets of weight slices. Integers only.

A plan is a pure function of what ranks hold and want, so every rank derives the same one. Ranks fall into *blocks*, the
smallest runs of consecutive ranks that together hold all that they want (one replica of the update weights); weights
never travel between blocks. Inside a block each weight is cut into *pieces*, and pieces in model order fill *buckets*.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from spmdrl.dataflow.resharding.planning.buckets import Bucket, BucketFilling, Transfer
from spmdrl.dataflow.resharding.planning.cells import Cell, cells_of
from spmdrl.nouns.batch import WeightSlice, whole_slice

Shapes = Mapping[str, tuple[int, ...]]
SlicesByRank = Mapping[int, Sequence[WeightSlice]]


@dataclass(frozen=True)
class Block:
    """Consecutive ranks that exchange weights only among themselves."""

    ranks: range
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True)
class ReshardPlan:
    """Buckets of every block."""

    blocks: tuple[Block, ...]
    element_bytes: Mapping[str, int]
    """element size on the wire, by weight"""
    ranks_per_node: int

    def block_of(self, rank: int) -> Block:
        return next(block for block in self.blocks if rank in block.ranks)

    def num_bytes(self, box: WeightSlice) -> int:
        """Return the bytes of a box on the wire."""
        return box.num_elements * self.element_bytes[box.name]

    def transfers(self, bucket: Bucket) -> Iterator[Transfer]:
        """Yield all transfers of a bucket, in the order of its pieces."""
        return itertools.chain.from_iterable(piece.transfers(self.ranks_per_node) for piece in bucket.pieces)


def plan_resharding(
    source: SlicesByRank,
    target: SlicesByRank,
    shapes: Shapes,
    bucket_bytes: int,
    element_bytes: int | Mapping[str, int],
    *,
    ranks_per_node: int | None = None,
    gathers: bool = True,
) -> ReshardPlan:
    """Plan the moves from the slices that ranks hold (`source`) to those that they want (`target`).

    `shapes` has the whole weights in model order; `element_bytes` is the element size on the wire, common or by weight.
    Without `ranks_per_node` all ranks count as one node. Buckets suit either executor, or the exact one alone unless
    it `gathers`. Raises ValueError for slices outside their weight, for wanted elements that no rank holds, and for
    buckets that can't take a single element.
    """
    if isinstance(element_bytes, int):
        element_bytes = dict.fromkeys(shapes, element_bytes)
    ranks_per_node = ranks_per_node or _num_ranks(source, target)
    blocks = []
    for ranks, cells_of_weights in cells_by_block(source, target, shapes):
        filling = BucketFilling(ranks, bucket_bytes, element_bytes, ranks_per_node, gathers=gathers)
        for cells in cells_of_weights:
            filling.add_weight(cells)
        blocks.append(Block(ranks, filling.finish()))
    return ReshardPlan(tuple(blocks), element_bytes, ranks_per_node)


def cells_by_block(
    source: SlicesByRank, target: SlicesByRank, shapes: Shapes
) -> Iterator[tuple[range, Iterator[list[Cell]]]]:
    """Yield the ranks of each block, with the wanted cells of each weight. Raises what `plan_resharding` does."""
    num_ranks = _num_ranks(source, target)
    held, wanted = _by_name(source, shapes), _by_name(target, shapes)
    size = _block_size(held, wanted, num_ranks)
    for first in range(0, num_ranks, size):
        ranks = range(first, first + size)
        yield ranks, map(partial(_cells_in, held=held, wanted=wanted, ranks=ranks), wanted)


def _num_ranks(source: SlicesByRank, target: SlicesByRank) -> int:
    return 1 + max((*source, *target), default=0)


def lendable(held: Sequence[WeightSlice], wanted: Sequence[WeightSlice]) -> frozenset[str]:
    """Return non-empty weights of which a rank holds exactly the box that it wants."""
    return frozenset(box.name for box in set(held).intersection(wanted) if box.num_elements)


_Boxes = dict[str, list[tuple[int, WeightSlice]]]


def _by_name(slices: SlicesByRank, shapes: Shapes) -> _Boxes:
    """Return (rank, slice) pairs by weight, in model order."""
    boxes: _Boxes = {name: [] for name in shapes}
    for rank in sorted(slices):
        for box in slices[rank]:
            whole = whole_slice(box.name, shapes.get(box.name, ()))
            fits = len(box.starts) == len(whole.starts) and (not box.num_elements or box.intersect(whole) == box)
            if box.name not in shapes or not fits:
                raise ValueError(f"rank {rank} has {box}, but the model has {box.name} {shapes.get(box.name)}")
            boxes[box.name].append((rank, box))
    return boxes


def _cells_in(name: str, held: _Boxes, wanted: _Boxes, ranks: range) -> list[Cell]:
    """Return the wanted cells of one weight as the ranks of one block see them."""
    return cells_of(
        name,
        [(rank, box) for rank, box in held[name] if rank in ranks],
        [(rank, box) for rank, box in wanted[name] if rank in ranks],
    )


def _block_size(held: _Boxes, wanted: _Boxes, num_ranks: int) -> int:
    """Return the smallest divisor of the world size such that each run of that many ranks holds all that it wants."""
    for size in range(1, num_ranks + 1):
        if num_ranks % size == 0 and _first_unheld(held, wanted, num_ranks, size) is None:
            return size
    unheld = _first_unheld(held, wanted, num_ranks, num_ranks)
    assert unheld is not None
    raise ValueError(f"ranks {unheld.wanters} want {unheld.box}, but no rank holds it; the source slices leave a gap")


def _first_unheld(held: _Boxes, wanted: _Boxes, num_ranks: int, size: int) -> Cell | None:
    for name in wanted:
        for first in range(0, num_ranks, size):
            for cell in _cells_in(name, held, wanted, range(first, first + size)):
                if not cell.holders:
                    return cell
    return None
