"""Causal attention over packed rows, for training and scoring.

Shape letters: `T` packed tokens, `H` query heads, `J` key and value heads, `K` head size, `V` head size of values.
"""

from __future__ import annotations

from torch import Tensor

from spmdrl.engines.models.kernels import ops
from spmdrl.engines.models.kernels.packed import PackedRows


class PackedCausalAttention:
    """Causal attention inside each packed row and none across rows; an `Attend` for training and scoring."""

    def __init__(self, offsets: Tensor):
        """Plan for rows with these offsets [B + 1]; give them on the CPU to avoid waiting for the device."""
        self._rows = PackedRows(offsets)

    def __call__(self, layer: int, q_THK: Tensor, k_TJK: Tensor, v_TJV: Tensor) -> Tensor:
        """Return the attended values [T, H, V]; J divides H, and V is at most K."""
        return ops.packed_attention(q_THK, k_TJK, v_TJV, self._rows)
