"""Sizes of parts that only some model families have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ClampedGate:
    """gpt-oss's gate: (min(max(up, -limit), limit) + 1) * g * sigmoid(alpha g), where g = min(gate, limit)."""

    limit: float
    """Largest value of the gate, and of the other factor in both directions."""
    alpha: float
    """Factor inside of the sigmoid."""


@dataclass(frozen=True)
class MoeConfig:
    """Sizes and rules of the sparse layers."""

    num_experts: int
    """Number E of experts in each sparse layer."""
    experts_per_token: int
    """Number C of experts per token."""
    intermediate_size: int
    """Width I of one expert."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Function from the router's products to affinities; sigmoid comes with a correction bias that affects only the
    choice."""
    normalize: bool = False
    """Normalise the weights of a token's experts to sum 1, before `weight_scale`."""
    weight_scale: float = 1.0
    """Factor of the weights."""
    num_groups: int = 1
    """Groups of neighbouring experts; a token chooses among the experts of its best groups only."""
    groups_per_token: int = 1
    """Groups that each token chooses among; a group's rank is the sum of its best two experts."""
    num_shared_experts: int = 0
    """Experts that every token goes through; together they are one feed-forward of this many times the width."""
    shared_size: int | None = None
    """Width of the feed-forward that every token goes through, in place of `num_shared_experts`."""
    shared_gate: bool = False
    """True if a sigmoid of each token scales what that feed-forward adds (Qwen3.5)."""
    bias: bool = False
    """True if the router and the experts' projections have biases (gpt-oss)."""
    clamp: ClampedGate | None = None
    """Limits of the experts' gate; None: plain SwiGLU."""
    dense_layers: tuple[int, ...] = ()
    """Layers that have a dense feed-forward instead."""

    def __post_init__(self) -> None:
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok is {self.experts_per_token}, but must be between 1 and the "
                f"{self.num_experts} experts"
            )
        if not 1 <= self.groups_per_token <= self.num_groups or self.num_experts % self.num_groups:
            raise ValueError(
                f"{self.num_experts} experts in n_group {self.num_groups} groups of which topk_group "
                f"{self.groups_per_token} are chosen: the groups must be equal and at least topk_group"
            )
        group_size = self.num_experts // self.num_groups
        if self.is_group_limited and (group_size < 2 or self.groups_per_token * group_size < self.experts_per_token):
            raise ValueError(
                f"topk_group {self.groups_per_token} groups of {group_size} experts can't give num_experts_per_tok "
                f"{self.experts_per_token} experts per token, of groups of 2 or more; raise topk_group or lower n_group"
            )

    @property
    def shared_width(self) -> int:
        """Width of the feed-forward that every token goes through; 0 without any."""
        return self.num_shared_experts * self.intermediate_size if self.shared_size is None else self.shared_size

    @property
    def is_group_limited(self) -> bool:
        return self.groups_per_token < self.num_groups


@dataclass(frozen=True)
class WindowConfig:
    """Layers whose attention sees the newest tokens only."""

    size: int
    """Number of tokens that a token sees, itself included."""
    layers: tuple[int, ...]
    """The layers."""
    rope_theta: float | None = None
    """Base of their rotary frequencies, without scaling; None: as in the other layers."""


@dataclass(frozen=True)
class KeySizes:
    """Keys and values of a layer's attention."""

    head_size: int
    """Head size K."""
    num_kv_heads: int
    """Key and value heads J."""
    are_values: bool = False
    """True if the key projection's outputs, before any norm or rotation, are the values too."""


@dataclass(frozen=True)
class DeltaSizes:
    """Layers with a gated delta network in place of attention."""

    layers: tuple[int, ...]
    """The layers."""
    num_key_heads: int
    """Query and key heads."""
    num_value_heads: int
    """Value heads, a multiple of the former; each has a state."""
    key_size: int
    """Head size of queries and keys."""
    value_size: int
    """Head size of values."""
    conv_width: int
    """Tokens that the convolution before it mixes."""

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"linear_num_value_heads {self.num_value_heads} is not a multiple of linear_num_key_heads "
                f"{self.num_key_heads}; each key head serves the same number of value heads"
            )


@dataclass(frozen=True)
class IndexerSizes:
    """Sizes of sparse attention's choice of earlier tokens (DeepSeek-V3.2), which has all of a row of `num_chosen`."""

    num_heads: int
    """Heads of the indexer."""
    head_size: int
    """Their size."""
    num_chosen: int
    """Tokens that a token sees, itself included."""
    shared_layers: tuple[int, ...]
    """Layers without an indexer, which use the choice of the layer before."""
    max_positions: int
    """Longest row that the model was made for; only those of `num_chosen` tokens are computed."""


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of multi-head latent attention."""

    query_rank: int | None
    """Size of the vector from which a token's queries are computed; None: computed from the hidden state."""
    key_value_rank: int
    """Size of the vector from which a token's keys and values are computed."""
    plain_size: int
    """Size of the part of each query and key that isn't rotated."""
    rotary_size: int
    """Size of the part of each query and key that is rotated; even."""
    value_size: int
    """Head size V of the values."""
    rotates_neighbours: bool = True
    """Rotate pairs of neighbouring dims (as DeepSeek's weights require); False: pairs half the part apart."""
    indexer: IndexerSizes | None = None
    """Choice of the tokens that a token sees; None: all."""

    def __post_init__(self) -> None:
        if self.rotary_size % 2:
            raise ValueError(
                f"qk_rope_head_dim {self.rotary_size} is odd, but the rotary embedding turns pairs; make it even"
            )
        if self.value_size > self.head_size:
            raise ValueError(
                f"v_head_dim {self.value_size} is above qk_nope_head_dim {self.plain_size} + qk_rope_head_dim "
                f"{self.rotary_size} = {self.head_size}, but attention computes values of at most the queries' size"
            )

    @property
    def head_size(self) -> int:
        """Head size K of queries and keys."""
        return self.plain_size + self.rotary_size
