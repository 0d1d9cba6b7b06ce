"""Placement of a micro-batch's tokens: the context rank that runs each, and the padding of rows.

All context ranks hold the same micro-batch and compute the same placement. A ring gives each of `C` ranks two chunks of
every row, c and 2C - 1 - c, for equal causal work; rows are padded to equal chunks. Two ranks, a row a0..a4 whose
prompt is a0 a1, and a row b0..b2 whose prompt is b0:

    place      0  1 | 2  3 | 4  5 | 6  7     8 | 9 |10 |11
    token     a0 a1 |a2 a3 |a4  . | .  .    b0 |b1 |b2 | .
    rank       0  0 | 1  1 | 1  1 | 0  0     0 | 1 | 1 | 0

    rank 0 runs [T]  a0 a1  .  . b0  .    and rates [P] at 1 and 4 of these, which predict a2 and b1
    rank 1 runs [T]  a2 a3 a4  . b1 b2    and rates [P] at 0, 1 and 4, which predict a3, a4 and b2
    joined           a2 b1 a3 a4 b2       and then put in the order of the rows [R]: a2 a3 a4 b1 b2

Ulysses cuts no row: each rank runs an equal run of places. Padding up to a given size per rank follows the rows.

Shape letters: `B` rows, `A` packed tokens of all rows, `T` tokens and padding of one rank, `R` rated tokens of all
ranks, `P` rated tokens of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from spmdrl.nouns.batch import offsets_of
from spmdrl.resources.layout import ContextKind
from spmdrl.resources.mesh import Axis


@dataclass(frozen=True)
class Placement:
    """Places of one micro-batch's tokens, on the host. Rows come first, each with its padding, then more padding."""

    context: Axis
    kind: ContextKind
    offsets: Tensor
    """[B + 1] places of the rows"""
    source: Tensor
    """[places] packed token at each place, -1 at padding"""
    owner: Tensor
    """[places] context rank that runs each place"""
    place_A: Tensor
    """Place of each packed token."""

    @cached_property
    def own_T(self) -> Tensor:
        """Places that this rank runs, in its order."""
        return (self.owner == self.context.rank).nonzero().flatten()

    @cached_property
    def source_T(self) -> Tensor:
        """Packed token at each of this rank's places, -1 at padding."""
        return self.source[self.own_T]


@dataclass(frozen=True)
class RatedTokens:
    """Rated tokens of this rank, and the order of all ranks' rated tokens; on the host."""

    places_P: Tensor
    """Places among those that this rank runs."""
    index_P: Tensor
    """Indexes among the R."""
    counts: tuple[int, ...]
    """Number per context rank."""
    order_R: Tensor
    """Index of each of the R in the concatenation over ranks."""

    @classmethod
    def of(cls, placement: Placement, rated_R: Tensor) -> RatedTokens:
        """Return the ratings at these packed tokens."""
        place_R = placement.place_A[rated_R]
        owner_R = placement.owner[place_R]
        index_P = (owner_R == placement.context.rank).nonzero().flatten()
        by_owner = owner_R.argsort(stable=True)
        order_R = torch.empty_like(by_owner)
        order_R[by_owner] = torch.arange(len(by_owner))
        counts = owner_R.bincount(minlength=placement.context.size).tolist()
        return cls(torch.searchsorted(placement.own_T, place_R[index_P]), index_P, tuple(counts), order_R)


def num_places(offsets: Tensor, context_size: int, kind: ContextKind) -> int:
    """Return the fewest places that rows with these offsets [B + 1] take on all context ranks together, before they are
    rounded up to a multiple of the ranks.
    """
    return int(_padded_lengths(offsets, context_size, kind).sum())


def place_tokens(offsets: Tensor, context: Axis, kind: ContextKind, *, size: int) -> Placement:
    """Place rows with these host offsets [B + 1] on `size` places, which divide equally over the ranks."""
    placed_offsets = offsets_of(_padded_lengths(offsets, context.size, kind))
    assert size >= placed_offsets[-1] and size % context.size == 0, (size, placed_offsets[-1], context)
    packed_A = torch.arange(int(offsets[-1]))
    place_A = packed_A + (placed_offsets - offsets)[:-1].repeat_interleave(offsets.diff())
    source = torch.full((size,), -1)
    source[place_A] = packed_A
    return Placement(context, kind, placed_offsets, source, _owners(placed_offsets, size, context, kind), place_A)


def _padded_lengths(offsets: Tensor, context_size: int, kind: ContextKind) -> Tensor:
    """Return [B] places of each row: a ring cuts rows into two chunks per rank, Ulysses cuts no row."""
    unit = 2 * context_size if kind == "ring" and context_size > 1 else 1
    return (offsets.diff() + unit - 1) // unit * unit


def _owners(offsets: Tensor, size: int, context: Axis, kind: ContextKind) -> Tensor:
    """Return [places] the context rank of each place. Padding after the rows is divided in equal runs."""
    if kind == "ulysses" or context.size == 1:
        return torch.arange(size) // max(1, size // context.size)
    lengths = offsets.diff()
    within_row = torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(lengths)
    chunk = within_row // (lengths // (2 * context.size)).repeat_interleave(lengths)
    num_more = (size - int(offsets[-1])) // context.size
    more = torch.arange(context.size).repeat_interleave(num_more)
    return torch.cat((torch.minimum(chunk, 2 * context.size - 1 - chunk), more))
