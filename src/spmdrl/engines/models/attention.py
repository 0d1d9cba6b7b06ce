"""Grouped-query attention: projections, head norms and rotation around the caller's attention.

Shape letters: `T` packed tokens, `D` model width, `H` query heads, `J` key and value heads, `K` head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from spmdrl.engines.models.kernels import ops
from spmdrl.engines.models.layers import Attend, Linear, RMSNorm
from spmdrl.engines.models.mixers import INPUTS, OUTPUTS, HeadCut, KeyBlocks, Rope, Rotations


@dataclass(frozen=True)
class AttentionConfig:
    """Sizes of one layer's attention; a `Mixer`."""

    name: ClassVar[str] = "self_attn"

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rope: Rope | None
    """None: queries and keys aren't rotated."""
    rms_eps: float
    qk_norm: bool
    """True if queries and keys are normalized per head before the rotation."""
    bias: bool
    """True if the query, key and value projections have biases."""
    output_bias: bool
    norm_offset: float | None = None
    """Number that is added to the weights of head norms."""
    scale: float | None = None
    """Factor of the scores; None is 1 / sqrt(K)."""
    window: int | None = None
    """Newest tokens that a token sees, itself included; None: all."""
    has_sinks: bool = False
    """True if each head's softmax has one more logit, a weight."""
    has_gate: bool = False
    """True if the query projection also gives a gate of each head's output (arXiv:2505.06708)."""
    v_norm: bool = False
    """True if values are normalized per head, without a weight."""
    keys_are_values: bool = False
    """True if the key projection's outputs are the values too."""

    @property
    def cuts(self) -> Mapping[str, HeadCut]:
        of_keys = HeadCut(OUTPUTS, self.num_heads, self.num_heads // self.num_kv_heads)
        of_queries, of_output = HeadCut(OUTPUTS, self.num_heads), HeadCut(INPUTS, self.num_heads)
        return {"q_proj": of_queries, "k_proj": of_keys, "v_proj": of_keys, "o_proj": of_output, "sinks": of_queries}

    @property
    def num_weights(self) -> int:
        num_query_parts, num_kv_parts = 3 if self.has_gate else 2, 1 if self.keys_are_values else 2
        num_heads = num_query_parts * self.num_heads + num_kv_parts * self.num_kv_heads
        return self.hidden_size * self.head_size * num_heads

    @property
    def attended_size(self) -> int:
        return self.num_heads * 2 * self.head_size

    def state(self, num_ranks: int) -> KeyBlocks:
        num_heads = self.num_kv_heads // min(self.num_kv_heads, num_ranks)
        return KeyBlocks(num_heads, self.head_size, self.head_size, self.window)

    def build(self, layer: int) -> nn.Module:
        return SelfAttention(self, layer)


class SelfAttention(nn.Module):
    """Attention of one layer, with transformers' names."""

    def __init__(self, config: AttentionConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.head_size, self.rope, self.has_gate = config.head_size, config.rope, config.has_gate
        self.window, self._v_norm_eps = config.window, config.rms_eps if config.v_norm else None
        self.joined = ("q_proj", "k_proj") if config.keys_are_values else ("q_proj", "k_proj", "v_proj")
        """Projections of the same input, which `project` computes."""
        self.sinks = nn.Parameter(torch.empty(config.num_heads)) if config.has_sinks else None
        # The caller's attention scales by 1 / sqrt(K).
        self._query_factor = 1.0 if config.scale is None else config.scale * config.head_size**0.5
        query_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        self.q_proj = Linear(config.hidden_size, query_size * (1 + config.has_gate), bias=config.bias)
        self.k_proj = Linear(config.hidden_size, kv_size, bias=config.bias)
        self.v_proj = None if config.keys_are_values else Linear(config.hidden_size, kv_size, bias=config.bias)
        self.o_proj = Linear(query_size, config.hidden_size, bias=config.output_bias)
        self.q_norm = self._head_norm(config) if config.qk_norm else None
        self.k_norm = self._head_norm(config) if config.qk_norm else None

    @staticmethod
    def _head_norm(config: AttentionConfig) -> RMSNorm:
        return RMSNorm(config.head_size, config.rms_eps, config.norm_offset)

    def forward(self, hidden_TD: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        q_THK, k_TJK, *own = (heads.unflatten(-1, (-1, self.head_size)) for heads in self.project(hidden_TD))
        [v_TJK] = own or [k_TJK]
        gate_THK = None
        if self.has_gate:
            # Each head's query and gate lie side by side.
            q_THK, gate_THK = q_THK[:, ::2], q_THK[:, 1::2]
        if self.q_norm is not None and self.k_norm is not None:
            q_THK, k_TJK = self.q_norm(q_THK), self.k_norm(k_TJK)
        if self._v_norm_eps is not None:
            v_TJK = ops.rms_norm(v_TJK, v_TJK.new_ones(self.head_size), self._v_norm_eps)
        if self.rope is not None:
            rotation = rotations.of(self.rope)
            q_THK, k_TJK = rotation.apply(q_THK), rotation.apply(k_TJK)
        if self._query_factor != 1:
            q_THK = q_THK * self._query_factor
        attended_THK = attend(self.layer, q_THK, k_TJK, v_TJK, window=self.window, sinks_H=self.sinks)
        if gate_THK is not None:
            attended_THK = attended_THK * ops.sigmoid(gate_THK)
        return self.o_proj(attended_THK.flatten(-2))

    def project(self, hidden_TD: Tensor) -> Sequence[Tensor]:
        """Compute query, key and value projections; replaced from outside by a single product."""
        return [getattr(self, name)(hidden_TD) for name in self.joined]
