"""Checksums of one switch: each generator holds exactly what the trainers sent, at the same version.

A piece's bit patterns, cast to the generator's dtype, are summed by its contributor before the source may leave, and by
every rank that received it. Sums are of wrapping integers weighted by position, so that skipped, moved, swapped, stale
and flipped values show. A few spots of every piece are always summed, different ones at each version; all elements with
`reshard.verify`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from spmdrl.dataflow.resharding.planning.buckets import Piece
from spmdrl.dataflow.resharding.planning.cells import SlicedWeights, cut
from spmdrl.nouns.batch import whole_slice
from spmdrl.resources.collectives import Group, sum_over

_NUM_SPOTS = 16
# Sums of integers need temporary memory, which must stay small beside a bucket.
_MAX_ELEMENTS_AT_ONCE = 1 << 18
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def all_elements(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return one sum per 2**18 elements."""
    whole = whole_slice("", values.shape)
    parts = cut(whole, -(-values.numel() // _MAX_ELEMENTS_AT_ONCE))
    patterns = (_patterns(values[part.index_within(whole)], dtype) for part in parts)
    return torch.stack([_weighted(one, torch.arange(len(one), device=one.device)).sum() for one in patterns])


@functools.lru_cache(maxsize=1024)
def spots(shape: tuple[int, ...], version: int) -> tuple[slice, ...]:
    """Return indexes of at most 16 elements, on a grid whose position in this shape depends on the version."""
    per_dim = max(2, int(_NUM_SPOTS ** (1 / max(1, len(shape)))))
    # Multiples of the golden ratio spread evenly, so that every element is summed at some version.
    place = version * 0x9E3779B97F4A7C15 % (1 << 64)
    index = []
    for size in shape:
        stride = -(-size // per_dim)
        place, start = divmod(place, stride)
        index.append(slice(start, None, stride))
    return tuple(index)


class SwitchRecord:
    """Digests of one switch: of the pieces sent, and of the same pieces received."""

    def __init__(self, pieces: Sequence[Piece], dtypes: Mapping[str, torch.dtype], *, rank: int, verify: bool):
        """`pieces` are the whole block's, in order; `dtypes` are the generator's; `verify` sums all elements."""
        self.version: int | None = None
        """version of the last switch"""
        self._pieces = pieces
        self._dtypes = dtypes
        self._rank = rank
        self._verify = verify
        self._sent: dict[int, Tensor] = {}
        self._received: dict[int, Tensor] = {}

    def begin(self, version: int) -> None:
        """Start on another switch."""
        self.version = version
        self._sent, self._received = {}, {}

    def add_sent(self, pieces: Iterable[Piece], held: SlicedWeights) -> None:
        """Sum the pieces that this rank answers for."""
        self._sent |= self._digests([piece for piece in pieces if piece.contributor == self._rank], held)

    def add_received(self, pieces: Iterable[Piece], wanted: SlicedWeights) -> None:
        """Sum the pieces that this rank wanted."""
        self._received |= self._digests([piece for piece in pieces if self._rank in piece.wanters], wanted)

    def differences(self, group: Group) -> list[str]:
        """Describe pieces that differ from what was sent. Collective over the block, whose group is given."""
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

    def _digests(self, pieces: Sequence[Piece], weights: SlicedWeights) -> dict[int, Tensor]:
        """Return digests by the piece's number: int64 [any], on the weights' device, of values cast to the dtype."""
        if self._verify:
            return {one.number: all_elements(weights.view(one.box), self._dtypes[one.box.name]) for one in pieces}
        return self._spots_of(pieces, weights)

    def _spots_of(self, pieces: Sequence[Piece], weights: SlicedWeights) -> dict[int, Tensor]:
        """Return the bit patterns of all pieces' spots at once, which is cheaper than an operation per piece."""
        assert self.version is not None, "begin comes first"
        alike: dict[tuple[torch.dtype, torch.dtype], dict[int, Tensor]] = {}
        for piece in pieces:
            values, dtype = weights.view(piece.box), self._dtypes[piece.box.name]
            chosen = values[spots(values.shape, self.version)].reshape(-1)
            alike.setdefault((values.dtype, dtype), {})[piece.number] = chosen
        found: dict[int, Tensor] = {}
        for (_, dtype), chosen_of in alike.items():
            patterns = _patterns(torch.cat(list(chosen_of.values())), dtype)
            found |= zip(chosen_of, patterns.split([len(chosen) for chosen in chosen_of.values()]), strict=True)
        return found

    def _sums(self, digests: Mapping[int, Tensor]) -> Tensor:
        """Return int64 [pieces, 2] on the host: 1 if a piece has a digest, and the digest's sum."""
        sums = torch.zeros(len(self._pieces), 2, dtype=torch.int64)
        if digests:
            numbers, lengths = torch.tensor([(number, len(digest)) for number, digest in digests.items()]).unbind(1)
            sums[numbers, 0] = 1
            # The only wait for the device.
            together = torch.cat(list(digests.values())).cpu()
            place = torch.arange(len(together)) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
            of_piece = numbers.repeat_interleave(lengths)
            sums[:, 1].index_add_(0, of_piece, _weighted(together, place))
        return sums


def _patterns(values: Tensor, dtype: torch.dtype) -> Tensor:
    elements = values.to(dtype).reshape(-1)
    return elements.view(_BITS[elements.element_size()]).to(torch.int64)


def _weighted(numbers: Tensor, place: Tensor) -> Tensor:
    """Return the numbers times an odd factor per place, which loses no bit on wrapping."""
    return numbers * (2 * place + 1)
