"""Checksums of weights, computed slice by slice on both sides: what the generator holds is what the trainer holds.

Two wrapping integer sums over the bit patterns are compared, one of them weighted by the element's position in the
whole weight, so that moved, swapped, stale and flipped values all show. They add up over slices and ranks, whatever the
layouts. A float64 sum goes along for the reader of an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.dataflow.resharding.buckets import Piece
from spmdrl.dataflow.resharding.cells import cut
from spmdrl.dataflow.resharding.slices import SlicedWeights
from spmdrl.resources.collectives import Group, max_over, sum_over
from spmdrl.types import WeightSlice

_MAX_ELEMENTS_AT_ONCE = 1 << 20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Checksum:
    """Sums over the elements of one box."""

    bits: int
    weighted_bits: int
    total: float


def checksum(values: Tensor, box: WeightSlice, shape: Sequence[int]) -> Checksum:
    """The checksum of `values`, which hold the elements of `box` of a weight of this whole shape."""
    bits, weighted, total = 0, 0, 0.0
    num_parts = -(-box.num_elements // _MAX_ELEMENTS_AT_ONCE)
    for part in cut(box, num_parts):
        elements = values[part.index_within(box)].contiguous()
        patterns = elements.view(_BITS[elements.element_size()]).to(torch.int64)
        # Odd factors lose no bit of the pattern when they wrap.
        factors = 2 * _positions(part, shape, values.device) + 1
        bits += int(patterns.sum())
        weighted += int((patterns * factors).sum())
        total += float(elements.sum(dtype=torch.float64))
    return Checksum(_wrapped(bits), _wrapped(weighted), total)


def _positions(box: WeightSlice, shape: Sequence[int], device: torch.device) -> Tensor:
    """Row-major positions, in the whole weight, of the elements of a box."""
    positions = torch.zeros((1,) * len(shape), dtype=torch.int64, device=device)
    stride = 1
    for dim in reversed(range(len(shape))):
        along = torch.arange(box.starts[dim], box.stops[dim], device=device) * stride
        positions = positions + along.view(-1, *[1] * (len(shape) - 1 - dim))
        stride *= shape[dim]
    return positions


def _wrapped(value: int) -> int:
    """The value as a signed 64-bit integer."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


class ChecksumRecord:
    """The checksums of one switch: those of the pieces sent, and of the same pieces where they arrived.

    `pieces` are those of the whole block, in order. Each is summed by its contributor before its source may leave.
    """

    def __init__(
        self, pieces: Sequence[Piece], shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
    ):
        self._index = {piece.box: index for index, piece in enumerate(pieces)}
        self._shapes = shapes
        self._dtypes = dtypes
        self._bits_sent = torch.zeros(len(pieces), 2, dtype=torch.int64)
        self._totals_sent = torch.zeros(len(pieces), dtype=torch.float64)
        self._received: dict[WeightSlice, Checksum] = {}

    def add_sent(self, pieces: Iterable[Piece], held: SlicedWeights, rank: int) -> None:
        """Sums the pieces that this rank answers for, as they look once cast to the generator's dtype."""
        for piece in pieces:
            if piece.contributor == rank:
                cast = held.view(piece.box).to(self._dtypes[piece.box.name])
                found, index = self._checksum(cast, piece.box), self._index[piece.box]
                self._bits_sent[index] = torch.tensor([found.bits, found.weighted_bits])
                self._totals_sent[index] = found.total

    def add_received(self, pieces: Iterable[Piece], wanted: SlicedWeights, rank: int) -> None:
        """Sums the pieces that this rank wanted."""
        for piece in pieces:
            if rank in piece.wanters:
                self._received[piece.box] = self._checksum(wanted.view(piece.box), piece.box)

    def compare(self, group: Group) -> None:
        """Raises RuntimeError on every rank if a piece arrived changed on any. Collective over the world.

        `group` is the block's.
        """
        bits, totals = sum_over(self._bits_sent, group).tolist(), sum_over(self._totals_sent, group).tolist()
        changed = [
            f"{box}: sum {found.total!r}, sent {totals[self._index[box]]!r}"
            for box, found in self._received.items()
            if [found.bits, found.weighted_bits] != bits[self._index[box]]
        ]
        # Over the world, not the group: all ranks stop together.
        worst = int(max_over(torch.tensor([len(changed)])))
        if worst:
            here = "; ".join(changed[:3]) or "none on this rank"
            raise RuntimeError(
                f"generation weights differ from the update weights in {worst} pieces on the worst rank "
                f"({len(changed)} here: {here}); nothing was generated with them, restart from the last checkpoint"
            )

    def _checksum(self, values: Tensor, box: WeightSlice) -> Checksum:
        return checksum(values, box, self._shapes[box.name])
