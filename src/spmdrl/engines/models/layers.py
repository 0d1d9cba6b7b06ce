"""Parts of decoder layers: norm, rotary embedding, gated feed-forward, and the interface of attention.

Shape letters: `T` packed tokens, `D` model width, `H` query heads, `J` key and value heads, `K` head size of queries
and keys, `U` head size of values.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from spmdrl.engines.models.kernels import ops
from spmdrl.engines.models.kernels.delta import last_columns
from spmdrl.engines.models.kernels.packed import PackedRows, Segments, Sinks, Window
from spmdrl.engines.models.kernels.prefixed import PrefixedRows
from spmdrl.engines.models.rope_scaling import RopeScaling


class Attend(Protocol):
    """Causal attention of one layer's packed queries over the caller's keys and values."""

    def __call__(
        self,
        layer: int,
        q_THK: Tensor,
        k_TJK: Tensor,
        v_TJU: Tensor,
        /,
        *,
        window: Window = None,
        sinks_H: Sinks = None,
    ) -> Tensor:
        """Return the attended values [T, H, U]; queries and keys arrive normalized and rotated.

        The softmax scale is always 1 / sqrt(K): a model with another one multiplies its queries. Windows and sinks are
        those of `ops.packed_attention`.
        """
        ...


class Recurrence(Protocol):
    """Convolution and recurrence of one layer's packed tokens, each inside the caller's rows."""

    def convolve(self, layer: int, values_TC: Tensor, weight_CW: Tensor, /) -> Tensor:
        """Return `ops.causal_conv` of each row [T, C]."""
        ...

    def recur(
        self, layer: int, q_TGK: Tensor, k_TGK: Tensor, v_THU: Tensor, log_decay_TH: Tensor, beta_TH: Tensor, /
    ) -> Tensor:
        """Return the outputs [T, H, U] of `ops.gated_delta` of each row."""
        ...


class Mix(Attend, Recurrence, Protocol):
    """Ways in which one layer's packed tokens meet the earlier ones of their rows."""


class RMSNorm(nn.Module):
    """Root mean square normalization over the last dim (arXiv:1910.07467, eq. 4), computed in float32."""

    def __init__(self, size: int, eps: float, offset: float | None = None):
        """With an `offset` the factor is offset + weight, and applied in float32 too (Gemma)."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.offset = offset

    def forward(self, values: Tensor) -> Tensor:
        if self.offset is None:
            return ops.rms_norm(values, self.weight, self.eps)
        factor = self.offset + self.weight.to(torch.float32)
        return ops.rms_norm(values.to(torch.float32), factor, self.eps).to(values.dtype)


# A plain class, because FSDP's mixed precision casts every float tensor in a layer's arguments to bfloat16, also inside
# tuples and dataclasses, and neighbouring positions would merge.
class Rotation:
    """Rotary embedding of packed positions (RoFormer, arXiv:2104.09864, eq. 34), half-split, in float32."""

    def __init__(self, positions_T: Tensor, size: int, theta: float, scaling: RopeScaling | None = None):
        """Prepare rotation of vectors of `size`: a head, or its rotated part."""
        exponents = torch.arange(0, size, 2, device=positions_T.device, dtype=torch.float32) / size
        frequencies = 1.0 / theta**exponents
        amplitude = 1.0
        self.latent_softmax_factor = 1.0
        """Factor of latent attention's softmax scale."""
        if scaling is not None:
            frequencies, amplitude = scaling.stretch(frequencies, theta), scaling.amplitude
            self.latent_softmax_factor = scaling.latent_softmax_factor
        angles = positions_T.to(torch.float32)[:, None, None] * frequencies
        self.cos, self.sin = angles.cos() * amplitude, angles.sin() * amplitude  # each [T, 1, K / 2]

    def apply(self, heads: Tensor) -> Tensor:
        """Rotate the first dims of heads [T, H, K], or all; computed in float32, returned in their dtype."""
        size = 2 * self.cos.shape[-1]
        if size == heads.shape[-1]:
            return ops.rotate(heads, self.cos, self.sin)
        return torch.cat((ops.rotate(heads[..., :size], self.cos, self.sin), heads[..., size:]), dim=-1)

    def apply_to_pairs(self, heads: Tensor) -> Tensor:
        """Rotate heads whose pairs are neighbours; the result is half-split, which changes no product of two."""
        return self.apply(torch.cat((heads[..., 0::2], heads[..., 1::2]), dim=-1))


class Linear(nn.Linear):
    """A projection by the fastest product of its device."""

    def forward(self, values: Tensor) -> Tensor:
        return ops.linear(values, self.weight, self.bias)


class FeedForward(nn.Module):
    """Gated feed-forward layer: SwiGLU, or GEGLU with the tanh form of GELU (arXiv:2002.05202, eq. 6)."""

    joined = ("gate_proj", "up_proj")
    """Projections of the same input, which `project` computes."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False, gelu: bool = False):
        super().__init__()
        self._gate = ops.geglu if gelu else ops.swiglu
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        return self.down_proj(self._gate(*self.project(hidden_TD)))

    def project(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Compute gate and up projections of the same input; replaced from outside by a single product."""
        return self.gate_proj(hidden_TD), self.up_proj(hidden_TD)


class PackedCausalAttention:
    """Causal attention inside each packed row and none across rows; an `Attend` for training and scoring."""

    def __init__(self, offsets: Tensor):
        """Plan for rows with these offsets [B + 1]; give them on the CPU to avoid waiting for the device."""
        self._rows = PackedRows(offsets)

    def __call__(
        self, layer: int, q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor, *, window: Window = None, sinks_H: Sinks = None
    ) -> Tensor:
        """Return the attended values [T, H, U]; J divides H, and U is at most K."""
        return ops.packed_attention(q_THK, k_TJK, v_TJU, self._rows, window, sinks_H)

    @property
    def segments(self) -> Segments:
        return self._rows.segments

    def convolve(self, layer: int, values_TC: Tensor, weight_CW: Tensor) -> Tensor:
        return ops.causal_conv(values_TC, weight_CW, self._rows)

    def recur(
        self, layer: int, q_TGK: Tensor, k_TGK: Tensor, v_THU: Tensor, log_decay_TH: Tensor, beta_TH: Tensor
    ) -> Tensor:
        out_THU, _ = ops.gated_delta(q_TGK, k_TGK, v_THU, log_decay_TH, beta_TH, self._rows)
        return out_THU


class SharedPromptAttention:
    """Causal attention inside the rows of one micro-batch with shared prompts, computed once."""

    def __init__(self, rows: PrefixedRows):
        self._rows = rows

    def __call__(
        self, layer: int, q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor, *, window: Window = None, sinks_H: Sinks = None
    ) -> Tensor:
        """Return the attended values [T, H, U]; J divides H, and U is at most K."""
        return ops.prefixed_attention(q_THK, k_TJK, v_TJU, self._rows, window, sinks_H)

    @property
    def segments(self) -> Segments:
        return self._rows.segments

    def convolve(self, layer: int, values_TC: Tensor, weight_CW: Tensor) -> Tensor:
        first_TC, own_TC = self._in_two(values_TC)
        ends_BWC = last_columns(first_TC, self._rows.first, weight_CW.shape[1] - 1)
        first = ops.causal_conv(first_TC, weight_CW, self._rows.first)
        own = ops.causal_conv(own_TC, weight_CW, self._rows.own, self._rows.before_own(ends_BWC))
        return torch.cat((first, own))

    def recur(
        self, layer: int, q_TGK: Tensor, k_TGK: Tensor, v_THU: Tensor, log_decay_TH: Tensor, beta_TH: Tensor
    ) -> Tensor:
        (q, own_q), (k, own_k), (v, own_v) = map(self._in_two, (q_TGK, k_TGK, v_THU))
        (log_decay, own_log_decay), (beta, own_beta) = map(self._in_two, (log_decay_TH, beta_TH))
        first_THU, ends_BHKU = ops.gated_delta(q, k, v, log_decay, beta, self._rows.first)
        before = self._rows.before_own(ends_BHKU)
        own_THU, _ = ops.gated_delta(own_q, own_k, own_v, own_log_decay, own_beta, self._rows.own, before)
        return torch.cat((first_THU, own_THU))

    def _in_two(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Split tokens into those of the first pieces and the own ones of rows after a prefix."""
        num_first = self._rows.num_first
        first, own = values.split([num_first, len(values) - num_first])
        return first, own
