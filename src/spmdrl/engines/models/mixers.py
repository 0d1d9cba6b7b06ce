"""Mixers as nouns: how the tokens of a layer meet the earlier ones of their rows.

A decoder's config names each layer's mixer by its sizes. Everything that differs by mixer is asked of it: the module
and its weights, the cuts over tensor and context ranks, the cost, and the state that generation keeps.

Shape letters: `T` packed tokens, `D` model width, `H` query heads, `J` key and value heads, `K` head size of queries
and keys, `U` head size of values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor, nn

from spmdrl.engines.models.layers import Rotation
from spmdrl.engines.models.rope_scaling import RopeScaling


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of queries and keys."""

    theta: float
    """Base of the frequencies."""
    size: int
    """Rotated dims of each head."""
    scaling: RopeScaling | None = None
    """Scaling of the frequencies to longer rows."""


@dataclass(frozen=True)
class StateKind:
    """Kind of state that generation keeps for a row: layers of one kind share the row's table of blocks."""

    window: int | None = None
    """Newest positions that are kept; None keeps all."""
    is_slot: bool = False
    """True for a state of one size, whatever the number of positions: the table is one block, the row's slot."""


@dataclass(frozen=True)
class KeyBlocks:
    """State of attention in generation: keys and values of each position, in blocks of a paged cache."""

    num_heads: int
    """Key and value heads J of one rank."""
    head_size: int
    """Head size K of the keys."""
    value_head_size: int
    """Head size U of the values."""
    window: int | None = None
    """Newest positions that the layer's attention sees; None: all."""

    @property
    def kind(self) -> StateKind:
        return StateKind(self.window)

    @property
    def token_size(self) -> int:
        """Numbers per position."""
        return self.num_heads * (self.head_size + self.value_head_size)

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of one block of so many positions in one layer."""
        return block_size * self.token_size * dtype.itemsize


@dataclass(frozen=True)
class Recurrent:
    """State of linear attention in generation, the same for rows of any length."""

    columns: tuple[int, int]
    """Last W - 1 inputs of C channels' convolution, on one rank, in the model's dtype."""
    matrices: tuple[int, int, int]
    """Matrix [K, U] of each of H heads of one rank, in float32."""

    @property
    def kind(self) -> StateKind:
        return StateKind(is_slot=True)

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of one slot in one layer."""
        return prod(self.columns) * dtype.itemsize + prod(self.matrices) * torch.float32.itemsize


State = KeyBlocks | Recurrent
OUTPUTS, INPUTS = 0, 1
"""Dims of a projection's weight."""


@dataclass(frozen=True)
class HeadCut:
    """Cut of a projection's weight over tensor ranks: by heads, in equal shares."""

    side: int
    """Dim that is cut: OUTPUTS or INPUTS; the ranks' outputs add up if it is the inputs."""
    num_heads: int
    heads_per_slot: int = 1
    """Heads that share a slot of the dim, as query heads share a key head; a rank with any of them holds the slot."""


class Rotations:
    """Rotations of one forward's positions, one for each kind of rotary embedding."""

    # A plain class for the reason that `Rotation` is one.
    def __init__(self, positions_T: Tensor, ropes: set[Rope]):
        self._of = {rope: Rotation(positions_T, rope.size, rope.theta, rope.scaling) for rope in ropes}

    def of(self, rope: Rope) -> Rotation:
        return self._of[rope]


class Mixer(Protocol):
    """Sizes of one layer's mixer, and what follows from them."""

    @property
    def name(self) -> str:
        """Name of the module in its layer, as transformers has it."""

    @property
    def rope(self) -> Rope | None:
        """Rotary embedding of its queries and keys."""

    @property
    def num_heads(self) -> int:
        """Query heads H, which tensor ranks divide."""

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads J."""

    @property
    def cuts(self) -> Mapping[str, HeadCut]:
        """Cuts over tensor ranks by the names of projections; the rest stays whole."""

    @property
    def num_weights(self) -> int:
        """Elements of its projections."""

    @property
    def attended_size(self) -> int:
        """Numbers that each pair of a token and an earlier one costs, in multiply-adds."""

    def state(self, num_ranks: int) -> State:
        """Return the state that generation keeps for a row on each of this many tensor ranks."""

    def build(self, layer: int) -> nn.Module:
        """Return its module for a layer of this number: from tokens [T, D], rotations and a `Mix` to mixed tokens."""
