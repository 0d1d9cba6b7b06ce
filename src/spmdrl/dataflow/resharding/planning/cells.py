"""Geometry of weight slices: a common grid of held and wanted boxes, and cuts of a box into parts."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from spmdrl.nouns.batch import WeightSlice

RankedBoxes = Iterable[tuple[int, WeightSlice]]


@dataclass
class Cell:
    """A box that each rank holds, and wants, whole or not at all."""

    box: WeightSlice
    holders: list[int] = field(default_factory=list)
    wanters: list[int] = field(default_factory=list)


def cells_of(name: str, held: RankedBoxes, wanted: RankedBoxes) -> list[Cell]:
    """Return one weight's wanted cells in row-major order, on the coarsest grid that fits all boxes of both sides."""
    holders, wanters = _ranks_by_box(held), _ranks_by_box(wanted)
    boxes = [*holders, *wanters]
    if not boxes:
        return []
    dims = range(len(boxes[0].starts))
    cuts = [sorted({box.starts[dim] for box in boxes} | {box.stops[dim] for box in boxes}) for dim in dims]
    cells: dict[tuple[int, ...], Cell] = {}
    for box, ranks in wanters.items():
        for index in _indexes(box, cuts):
            cells.setdefault(index, Cell(_box_at(name, index, cuts))).wanters.extend(ranks)
    for box, ranks in holders.items():
        for index in _indexes(box, cuts):
            if index in cells:
                cells[index].holders.extend(ranks)
    return [_checked(cells[index]) for index in sorted(cells)]


def cut(box: WeightSlice, num_parts: int) -> list[WeightSlice]:
    """Cut a box into about `num_parts` equal parts along dim 0, and further dims if that is too short."""
    return _cut_from(box, num_parts, dim=0)


def _cut_from(box: WeightSlice, num_parts: int, dim: int) -> list[WeightSlice]:
    if num_parts <= 1 or dim == len(box.starts):
        return [box]
    length = box.shape[dim]
    num_here = min(num_parts, length)
    bounds = [length * part // num_here for part in range(num_here + 1)]
    parts = [box.narrowed(dim, low, high) for low, high in itertools.pairwise(bounds)]
    parts_each = -(-num_parts // num_here)
    return [smaller for part in parts for smaller in _cut_from(part, parts_each, dim + 1)]


def _ranks_by_box(boxes: RankedBoxes) -> dict[WeightSlice, list[int]]:
    ranks: dict[WeightSlice, list[int]] = {}
    for rank, box in boxes:
        if box.num_elements:
            ranks.setdefault(box, []).append(rank)
    return ranks


def _indexes(box: WeightSlice, cuts: list[list[int]]) -> Iterable[tuple[int, ...]]:
    """Return grid indexes of the cells inside a box whose bounds are all among the cuts."""
    spans = [
        range(bisect.bisect_left(along, start), bisect.bisect_left(along, stop))
        for along, start, stop in zip(cuts, box.starts, box.stops, strict=True)
    ]
    return itertools.product(*spans)


def _box_at(name: str, index: tuple[int, ...], cuts: list[list[int]]) -> WeightSlice:
    starts = tuple(along[i] for along, i in zip(cuts, index, strict=True))
    stops = tuple(along[i + 1] for along, i in zip(cuts, index, strict=True))
    return WeightSlice(name, starts, stops)


def _checked(cell: Cell) -> Cell:
    """Return the cell with sorted ranks; a rank may hold an element twice, but must not want it twice."""
    cell.holders = sorted(set(cell.holders))
    if len(set(cell.wanters)) < len(cell.wanters):
        twice = sorted(rank for rank in set(cell.wanters) if cell.wanters.count(rank) > 1)
        raise ValueError(f"ranks {twice} want {cell.box} in more than one target slice; target slices must not overlap")
    cell.wanters.sort()
    return cell


class SlicedWeights:
    """Tensors of one rank, each with a slice of a weight; any box inside a slice can be viewed."""

    def __init__(self, tensors: Mapping[WeightSlice, Tensor]):
        self._by_name: dict[str, list[tuple[WeightSlice, Tensor]]] = {}
        for outer, tensor in tensors.items():
            assert tuple(tensor.shape) == outer.shape, (outer, tuple(tensor.shape))
            self._by_name.setdefault(outer.name, []).append((outer, tensor.detach()))

    def view(self, box: WeightSlice) -> Tensor:
        """Return the box's elements, as a view."""
        for outer, tensor in self._by_name.get(box.name, ()):
            if box == outer:
                return tensor
            if outer.intersect(box) == box:
                return tensor[box.index_within(outer)]
        raise AssertionError(f"{box} is in none of {[outer for outer, _ in self._by_name.get(box.name, ())]}")
