"""Gated delta networks, the linear attention of Qwen3-Next and Qwen3.5 (arXiv:2412.06464).

Projections, a convolution and gates around the caller's recurrence.

Shape letters: `T` packed tokens, `D` model width, `G` heads of queries and keys, `H` of values, `K` and `U` their
sizes, `C` channels and `W` width of the convolution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from spmdrl.engines.models.kernels import ops
from spmdrl.engines.models.layers import Linear, Mix, RMSNorm
from spmdrl.engines.models.mixers import INPUTS, OUTPUTS, HeadCut, Recurrent, Rotations


@dataclass(frozen=True)
class DeltaConfig:
    """Sizes of one layer's gated delta network; a `Mixer`."""

    name: ClassVar[str] = "linear_attn"
    rope: ClassVar[None] = None
    attended_size: ClassVar[int] = 0

    hidden_size: int
    num_heads: int
    """Value heads H, each with a state."""
    num_kv_heads: int
    """Query and key heads G, which divide the value heads."""
    key_size: int
    """Head size K of queries and keys."""
    value_size: int
    """Head size U of values."""
    conv_width: int
    """Tokens W that the convolution mixes."""
    rms_eps: float

    @property
    def cuts(self) -> Mapping[str, HeadCut]:
        of_keys, of_values = (
            HeadCut(OUTPUTS, self.num_heads, self.num_heads // self.num_kv_heads),
            HeadCut(OUTPUTS, self.num_heads),
        )
        by_keys = ("in_proj_q", "in_proj_k", "conv_q", "conv_k")
        by_values = ("in_proj_v", "in_proj_z", "in_proj_b", "in_proj_a", "conv_v", "A_log", "dt_bias")
        return {
            **dict.fromkeys(by_keys, of_keys),
            **dict.fromkeys(by_values, of_values),
            "out_proj": HeadCut(INPUTS, self.num_heads),
        }

    @property
    def num_weights(self) -> int:
        key_channels, value_channels = self.num_kv_heads * self.key_size, self.num_heads * self.value_size
        projections = self.hidden_size * (2 * key_channels + 3 * value_channels + 2 * self.num_heads)
        # A token's products with its states cost as much as if these were weights, of three projections.
        states = 3 * self.num_heads * self.key_size * self.value_size
        return projections + (2 * key_channels + value_channels) * self.conv_width + states

    def state(self, num_ranks: int) -> Recurrent:
        num_key_heads, num_heads = self.num_kv_heads // min(self.num_kv_heads, num_ranks), self.num_heads // num_ranks
        num_channels = 2 * num_key_heads * self.key_size + num_heads * self.value_size
        return Recurrent((self.conv_width - 1, num_channels), (num_heads, self.key_size, self.value_size))

    def build(self, layer: int) -> nn.Module:
        return GatedDeltaNet(self, layer)


class GatedDeltaNet(nn.Module):
    """Linear attention of one layer, with transformers' names.

    The projection and the convolution that transformers have for queries, keys and values together are three each here,
    so that heads can be cut: `in_proj_qkv` and `conv1d` are theirs, one after the other along the outputs.
    """

    joined = ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z", "in_proj_b", "in_proj_a")
    """Projections of the same input, which `project` computes."""

    def __init__(self, config: DeltaConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.key_size, self.value_size = config.key_size, config.value_size
        key_channels, value_channels = config.num_kv_heads * config.key_size, config.num_heads * config.value_size
        self.in_proj_q = Linear(config.hidden_size, key_channels, bias=False)
        self.in_proj_k = Linear(config.hidden_size, key_channels, bias=False)
        self.in_proj_v = Linear(config.hidden_size, value_channels, bias=False)
        self.in_proj_z = Linear(config.hidden_size, value_channels, bias=False)
        self.in_proj_b = Linear(config.hidden_size, config.num_heads, bias=False)
        self.in_proj_a = Linear(config.hidden_size, config.num_heads, bias=False)
        self.conv_q = ChannelFilter(key_channels, config.conv_width)
        self.conv_k = ChannelFilter(key_channels, config.conv_width)
        self.conv_v = ChannelFilter(value_channels, config.conv_width)
        self.A_log = nn.Parameter(torch.empty(config.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(config.num_heads))
        self.norm = RMSNorm(config.value_size, config.rms_eps)
        self.out_proj = Linear(value_channels, config.hidden_size, bias=False)

    def forward(self, hidden_TD: Tensor, rotations: Rotations, attend: Mix) -> Tensor:
        *mixed, gate, b_TH, a_TH = self.project(hidden_TD)
        weight_CW = torch.cat([conv.weight for conv in (self.conv_q, self.conv_k, self.conv_v)]).squeeze(1)
        values_TC = attend.convolve(self.layer, torch.cat(mixed, dim=-1), weight_CW)
        q, k, v = values_TC.split([x.shape[-1] for x in mixed], dim=-1)
        q_TGK, k_TGK = (x.unflatten(-1, (-1, self.key_size)) for x in (q, k))
        v_THU, gate_THU = (x.unflatten(-1, (-1, self.value_size)) for x in (v, gate))
        log_decay_TH = -self.A_log.float().exp() * ops.softplus(a_TH.float() + self.dt_bias.float())
        out_THU = attend.recur(self.layer, q_TGK, k_TGK, v_THU, log_decay_TH, ops.sigmoid(b_TH))
        gated_THU = ops.swiglu(gate_THU.float(), self.norm(out_THU).float()).to(hidden_TD.dtype)
        return self.out_proj(gated_THU.flatten(-2))

    def project(self, hidden_TD: Tensor) -> tuple[Tensor, ...]:
        """Compute all projections of the input; replaced from outside by a single product."""
        return tuple(getattr(self, name)(hidden_TD) for name in self.joined)


class ChannelFilter(nn.Module):
    """Weight [C, 1, W] of a convolution of each channel by itself, in transformers' shape."""

    def __init__(self, num_channels: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_channels, 1, width))
