"""Where the tokens of a micro-batch are computed: which context rank takes which, and where rows are padded.

All context ranks hold the same micro-batch, place it alike, and compute their own tokens only. With one context rank
and no size to reach, places and packed tokens coincide.

Shape letters: `B` rows, `T` packed tokens, `P` places (tokens and padding of all context ranks), `t` the places of one
rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from spmdrl.resources.layout import ContextKind
from spmdrl.resources.mesh import Axis
from spmdrl.types import offsets_of


@dataclass(frozen=True)
class Placement:
    """Places of one micro-batch's tokens, on the host. Rows come first, each with its padding, then more padding."""

    context: Axis
    kind: ContextKind
    offsets: Tensor
    """[B + 1] places of the rows"""
    source_P: Tensor
    """The packed token at each place, -1 at padding."""
    place_T: Tensor
    """The place of each packed token."""
    owner_P: Tensor
    """The context rank that computes each place."""

    @property
    def num_places(self) -> int:
        """Tokens and padding of all context ranks together."""
        return self.source_P.numel()

    @property
    def num_own(self) -> int:
        """Tokens and padding of each context rank."""
        return self.num_places // self.context.size

    @property
    def is_identity(self) -> bool:
        """Whether this rank computes the packed tokens as they are."""
        return self.context.size == 1 and self.num_places == self.place_T.numel()

    @cached_property
    def own_t(self) -> Tensor:
        """The places that this rank computes, in its order."""
        return (self.owner_P == self.context.rank).nonzero().flatten()

    @cached_property
    def row_t(self) -> Tensor:
        """The row at each own place, -1 at padding."""
        row_P = torch.full((self.num_places,), -1)
        num_rows = self.offsets.numel() - 1
        row_P[: int(self.offsets[-1])] = torch.arange(num_rows).repeat_interleave(self.offsets.diff())
        return row_P[self.own_t].masked_fill_(self.source_P[self.own_t] < 0, -1)


def placed_size(offsets: Tensor, context_size: int, kind: ContextKind, multiple: int = 1) -> int:
    """The fewest places that rows with these offsets [B + 1] take on all context ranks together.

    Every context rank takes as many, a multiple of `multiple`.
    """
    num_padded, unit = int(_padded_lengths(offsets, context_size, kind).sum()), context_size * multiple
    return -(-num_padded // unit) * unit


def place_tokens(
    offsets: Tensor, context: Axis, kind: ContextKind, *, multiple: int = 1, num_tokens: int | None = None
) -> Placement:
    """Place rows with these host offsets [B + 1] on `num_tokens` places, or as few as they take (`placed_size`)."""
    fewest = placed_size(offsets, context.size, kind, multiple)
    num_places = fewest if num_tokens is None else num_tokens
    assert num_places >= fewest and num_places % (context.size * multiple) == 0, (num_places, fewest, context, multiple)
    placed_offsets = offsets_of(_padded_lengths(offsets, context.size, kind))
    packed_T = torch.arange(int(offsets[-1]))
    place_T = packed_T + (placed_offsets - offsets)[:-1].repeat_interleave(offsets.diff())
    source_P = torch.full((num_places,), -1)
    source_P[place_T] = packed_T
    owner_P = _owners(placed_offsets, num_places, context, kind)
    return Placement(context, kind, placed_offsets, source_P, place_T, owner_P)


def _padded_lengths(offsets: Tensor, context_size: int, kind: ContextKind) -> Tensor:
    """[B] places of each row: a ring cuts rows into two chunks a rank, the other ways cut no row."""
    unit = 2 * context_size if kind == "ring" and context_size > 1 else 1
    return (offsets.diff() + unit - 1) // unit * unit


def _owners(offsets: Tensor, num_places: int, context: Axis, kind: ContextKind) -> Tensor:
    """[P] the context rank of each place. Padding after the rows is dealt out in equal runs."""
    if kind == "ulysses" or context.size == 1:
        return torch.arange(num_places) // max(1, num_places // context.size)
    lengths = offsets.diff()
    within_row = torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(lengths)
    chunk = within_row // (lengths // (2 * context.size)).repeat_interleave(lengths)
    num_more = (num_places - int(offsets[-1])) // context.size
    more = torch.arange(context.size).repeat_interleave(num_more)
    return torch.cat((torch.minimum(chunk, 2 * context.size - 1 - chunk), more))
