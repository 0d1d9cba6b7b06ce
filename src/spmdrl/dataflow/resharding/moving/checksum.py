"""Checksums of one switch: what each generator holds is what the trainers sent, at the version that they sent.

A piece's bit patterns, cast to the generator's dtype, are summed by the one rank that answers for it before its source
may leave, and by every rank that wanted it where it arrived. Sums are of wrapping integers weighted by position, so
that skipped, moved, swapped, stale and flipped values show. Always a few spots of every piece are summed, other ones at
each version; all elements with `reshard.verify`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from spmdrl.dataflow.resharding.planning.buckets import Piece
from spmdrl.dataflow.resharding.planning.cells import SlicedWeights, cut
from spmdrl.resources.collectives import Group, sum_over
from spmdrl.types import whole_slice

_NUM_SPOTS = 16
# Sums of integers need temporary memory, which is to be little beside a bucket.
_MAX_ELEMENTS_AT_ONCE = 1 << 18
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Digest = Callable[[Tensor, torch.dtype], Tensor]
"""int64 numbers [any], where the values are, that stand for the values once cast to a dtype"""


def all_elements(values: Tensor, dtype: torch.dtype) -> Tensor:
    """One sum of every 2**18 elements or less."""
    whole = whole_slice("", values.shape)
    parts = cut(whole, -(-values.numel() // _MAX_ELEMENTS_AT_ONCE))
    return torch.stack([_weighted(_patterns(values[part.index_within(whole)], dtype)).sum() for part in parts])


def spots(values: Tensor, dtype: torch.dtype, *, version: int) -> Tensor:
    """The bit patterns of at most 16 elements, on a grid whose place in the piece follows from the version."""
    per_dim = max(2, int(_NUM_SPOTS ** (1 / max(1, values.ndim))))
    # Multiples of the golden ratio spread, so that each element has its turn.
    place = version * 0x9E3779B97F4A7C15 % (1 << 64)
    index = []
    for size in values.shape:
        stride = -(-size // per_dim)
        place, start = divmod(place, stride)
        index.append(slice(start, None, stride))
    return _patterns(values[tuple(index)], dtype)


class SwitchRecord:
    """The digests of one switch: those of the pieces sent, and of the same pieces where they arrived."""

    def __init__(self, pieces: Sequence[Piece], dtypes: Mapping[str, torch.dtype], *, rank: int, verify: bool):
        """`pieces` are those of the whole block, in order; `dtypes` are the generator's; `verify` sums all elements."""
        self.version: int | None = None
        """of the last switch"""
        self._pieces = pieces
        self._dtypes = dtypes
        self._rank = rank
        self._verify = verify
        self._digest: Digest = all_elements
        self._sent: dict[int, Tensor] = {}
        self._received: dict[int, Tensor] = {}

    def begin(self, version: int) -> None:
        """Starts on another switch."""
        self.version = version
        self._digest = all_elements if self._verify else functools.partial(spots, version=version)
        self._sent, self._received = {}, {}

    def add_sent(self, pieces: Iterable[Piece], held: SlicedWeights) -> None:
        """Sums the pieces that this rank answers for."""
        mine = (piece for piece in pieces if piece.contributor == self._rank)
        self._sent.update((piece.number, self._digest_of(piece, held)) for piece in mine)

    def add_received(self, pieces: Iterable[Piece], wanted: SlicedWeights) -> None:
        """Sums the pieces that this rank wanted."""
        mine = (piece for piece in pieces if self._rank in piece.wanters)
        self._received.update((piece.number, self._digest_of(piece, wanted)) for piece in mine)

    def differences(self, group: Group) -> list[str]:
        """What arrived here otherwise than it was sent, in words. Collective over the block, whose group it is."""
        sent = sum_over(self._sums(self._sent), group).tolist()
        received = self._sums(self._received).tolist()
        found = []
        for piece, (times_sent, sum_sent), (times_received, sum_received) in zip(
            self._pieces, sent, received, strict=True
        ):
            if self._rank not in piece.wanters:
                continue
            if (times_sent, times_received) != (1, 1):
                found.append(f"{piece.box}: sent {times_sent} times, received {times_received} times")
            elif sum_sent != sum_received:
                found.append(f"{piece.box}: checksum {sum_received:#x}, sent {sum_sent:#x}")
        return found

    def _digest_of(self, piece: Piece, weights: SlicedWeights) -> Tensor:
        return self._digest(weights.view(piece.box), self._dtypes[piece.box.name])

    def _sums(self, digests: Mapping[int, Tensor]) -> Tensor:
        """int64 [pieces, 2] on the host: whether a piece has a digest, and the digest's sum."""
        sums = torch.zeros(len(self._pieces), 2, dtype=torch.int64)
        if digests:
            numbers = torch.tensor(list(digests))
            padded = torch.nn.utils.rnn.pad_sequence(list(digests.values()), batch_first=True)
            sums[numbers, 0] = 1
            # The only wait for the device.
            sums[numbers, 1] = _weighted(padded).sum(dim=1).cpu()
        return sums


def _patterns(values: Tensor, dtype: torch.dtype) -> Tensor:
    elements = values.to(dtype).reshape(-1)
    return elements.view(_BITS[elements.element_size()]).to(torch.int64)


def _weighted(numbers: Tensor) -> Tensor:
    """The numbers times odd factors along the last dim: those lose no bit of a number when they wrap."""
    return numbers * (2 * torch.arange(numbers.shape[-1], device=numbers.device) + 1)
