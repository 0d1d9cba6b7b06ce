"""Where the tokens of a micro-batch are computed: which context rank runs which, and where rows are padded.

All context ranks hold the same micro-batch and place it alike. A ring gives each of `C` ranks two chunks of every row,
c and 2C - 1 - c, so that all have the same causal work; rows are padded to equal chunks. Two ranks, a row a0..a4 whose
prompt is a0 a1, and a row b0..b2 whose prompt is b0:

    place      0  1 | 2  3 | 4  5 | 6  7     8 | 9 |10 |11
    token     a0 a1 |a2 a3 |a4  . | .  .    b0 |b1 |b2 | .
    rank       0  0 | 1  1 | 1  1 | 0  0     0 | 1 | 1 | 0

    rank 0 runs [T]  a0 a1  .  . b0  .    and rates [P] at 1 and 4 of these, which predict a2 and b1
    rank 1 runs [T]  a2 a3 a4  . b1 b2    and rates [P] at 0, 1 and 4, which predict a3, a4 and b2
    joined           a2 b1 a3 a4 b2       and then put in the order of the rows [R]: a2 a3 a4 b1 b2

Ulysses cuts no row: each rank runs an equal run of places. What fills ranks up to a given size stands behind the rows.

Shape letters: `B` rows, `A` packed tokens of all rows, `T` tokens and padding of one rank, `R` rated tokens of all
ranks, `P` those of one.
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
    """[places] the packed token at each place, -1 at padding"""
    owner: Tensor
    """[places] the context rank that runs each place"""
    place_A: Tensor
    """The place of each packed token."""

    @cached_property
    def own_T(self) -> Tensor:
        """The places that this rank runs, in its order."""
        return (self.owner == self.context.rank).nonzero().flatten()

    @cached_property
    def source_T(self) -> Tensor:
        """The packed token at each of them, -1 at padding."""
        return self.source[self.own_T]


@dataclass(frozen=True)
class RatedTokens:
    """Which of the rated tokens are rated by this rank, and where each rank's stand among all; on the host."""

    places_P: Tensor
    """Their places among those that this rank runs."""
    index_P: Tensor
    """Which of the R they are."""
    counts: tuple[int, ...]
    """Of each context rank."""
    order_R: Tensor
    """Where each of the R stands when those of all ranks follow each other."""

    @classmethod
    def of(cls, placement: Placement, rated_R: Tensor) -> RatedTokens:
        """The ratings at these packed tokens."""
        place_R = placement.place_A[rated_R]
        owner_R = placement.owner[place_R]
        index_P = (owner_R == placement.context.rank).nonzero().flatten()
        by_owner = owner_R.argsort(stable=True)
        order_R = torch.empty_like(by_owner)
        order_R[by_owner] = torch.arange(len(by_owner))
        counts = owner_R.bincount(minlength=placement.context.size).tolist()
        return cls(torch.searchsorted(placement.own_T, place_R[index_P]), index_P, tuple(counts), order_R)


def num_places(offsets: Tensor, context_size: int, kind: ContextKind) -> int:
    """The fewest places that rows with these offsets [B + 1] take on all context ranks together.

    Before they are rounded up to as many on each rank.
    """
    return int(_padded_lengths(offsets, context_size, kind).sum())


def place_tokens(offsets: Tensor, context: Axis, kind: ContextKind, *, size: int) -> Placement:
    """Place rows with these host offsets [B + 1] on `size` places, equally many of which each rank runs."""
    placed_offsets = offsets_of(_padded_lengths(offsets, context.size, kind))
    assert size >= placed_offsets[-1] and size % context.size == 0, (size, placed_offsets[-1], context)
    packed_A = torch.arange(int(offsets[-1]))
    place_A = packed_A + (placed_offsets - offsets)[:-1].repeat_interleave(offsets.diff())
    source = torch.full((size,), -1)
    source[place_A] = packed_A
    return Placement(context, kind, placed_offsets, source, _owners(placed_offsets, size, context, kind), place_A)


def _padded_lengths(offsets: Tensor, context_size: int, kind: ContextKind) -> Tensor:
    """[B] places of each row: a ring cuts rows into two chunks per rank, Ulysses cuts no row."""
    unit = 2 * context_size if kind == "ring" and context_size > 1 else 1
    return (offsets.diff() + unit - 1) // unit * unit


def _owners(offsets: Tensor, size: int, context: Axis, kind: ContextKind) -> Tensor:
    """[places] the context rank of each place. Padding after the rows is dealt out in equal runs."""
    if kind == "ulysses" or context.size == 1:
        return torch.arange(size) // max(1, size // context.size)
    lengths = offsets.diff()
    within_row = torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(lengths)
    chunk = within_row // (lengths // (2 * context.size)).repeat_interleave(lengths)
    num_more = (size - int(offsets[-1])) // context.size
    more = torch.arange(context.size).repeat_interleave(num_more)
    return torch.cat((torch.minimum(chunk, 2 * context.size - 1 - chunk), more))
