"""Operations on Ascend NPUs, by torch_npu's fused operators; the only file that calls them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.models.kernels import plain
from spmdrl.engines.models.kernels.packed import (
    PackedRows,
    Sinks,
    Window,
    nothing_attended,
    pad_values,
    padded_attention,
)
from spmdrl.engines.models.kernels.prefixed import PrefixedRows, copy_rows, padded_prefixed_attention

_HALF = (torch.bfloat16, torch.float16)
# npu_fusion_attention's sparse mode 3 is the causal mask of each row, which it reads from one triangle of this size; in
# mode 4 a query also sees no more than `pre_tockens` keys before its own.
_CAUSAL_MODE, _BAND_MODE = 3, 4
_TRIANGLE_SIZE = 2048
# The documented limit of rows in one call.
_MOST_ROWS = 1024
# npu_grouped_matmul's codes: one output tensor, groups along the rows (0) or along the summed dim (2), sizes as counts.
_ONE_OUTPUT = 3
_GROUPS_OF_ROWS, _GROUPS_OF_SUMMANDS = 0, 2
_COUNTS = 1


@cache
def _operators() -> Any:
    # An optional back end: importing it without its toolkit fails, and breaks torch too.
    import torch_npu

    return torch_npu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype != weight.dtype:
        return plain.rms_norm(x, weight, eps)
    normed, _ = _operators().npu_rms_norm(x, weight, epsilon=eps)
    return normed


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # The operator takes [1, T, H, K] with whole cosines and sines, and computes in its input's dtype.
    cos, sin = (torch.cat((half, half), dim=-1).unsqueeze(0) for half in (cos, sin))
    turned = _operators().npu_rotary_mul(heads.to(torch.float32).unsqueeze(0), cos, sin)
    return turned.squeeze(0).to(heads.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    if not gate.numel():
        return plain.swiglu(gate, up)
    return _operators().npu_swiglu(torch.cat((gate, up), dim=-1), dim=-1)


def grouped_linear(rows_MD: Tensor, weights_EOD: Tensor, counts_E: Tensor) -> Tensor:
    if not len(rows_MD):
        return plain.grouped_linear(rows_MD, weights_EOD, counts_E)
    if len(weights_EOD) == 1:
        # The operator refuses a list of one count.
        return F.linear(rows_MD, weights_EOD[0])
    return _GroupedLinear.apply(rows_MD, weights_EOD, counts_E.to(rows_MD.device, torch.int64))


# The operator has no gradient of its own.
class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_MD: Tensor, weights_EOD: Tensor, counts_E: Tensor) -> Tensor:
        ctx.save_for_backward(rows_MD, weights_EOD, counts_E)
        return _grouped_matmul(rows_MD, weights_EOD.transpose(1, 2), counts_E, _GROUPS_OF_ROWS)

    @staticmethod
    def backward(ctx: Any, gradient_MO: Tensor) -> tuple[Tensor | None, ...]:
        rows_MD, weights_EOD, counts_E = ctx.saved_tensors
        gradient_MO = gradient_MO.contiguous()
        by_rows_MD = _grouped_matmul(gradient_MO, weights_EOD, counts_E, _GROUPS_OF_ROWS)
        by_weights_EOD = _grouped_matmul(gradient_MO.T, rows_MD, counts_E, _GROUPS_OF_SUMMANDS)
        # The operator's result for an expert without rows isn't documented.
        return by_rows_MD, by_weights_EOD.masked_fill_((counts_E == 0)[:, None, None], 0), None


def _grouped_matmul(x: Tensor, weight: Tensor, counts_E: Tensor, group_type: int) -> Tensor:
    results = _operators().npu_grouped_matmul(
        [x], [weight], group_list=counts_E, split_item=_ONE_OUTPUT, group_type=group_type, group_list_type=_COUNTS
    )
    return results[0]


def add_matmul(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    if not (a.dtype in _HALF and a.dtype == b.dtype and a.numel() and b.numel()):
        return plain.add_matmul(out, a, b)
    try:
        # torch_npu's name begins with an underscore; MindSpeed's operator of the same name is compiled separately.
        _operators()._npu_matmul_add_fp32(a, b, out)
    except OSError:
        # Part of Ascend's transformer library (NNAL), which is installed apart from CANN.
        return plain.add_matmul(out, a, b)
    return out


def packed_attention(
    q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor, rows: PackedRows, window: Window = None, sinks_H: Sinks = None
) -> Tensor:
    if not rows.lengths:
        return nothing_attended(q_THK, k_TJK, v_TJU)
    if sinks_H is not None:
        # The operator's logsumexps have no gradient.
        return padded_attention(q_THK, k_TJK, v_TJU, rows, window, sinks_H)
    return _attend_rows(q_THK, k_TJK, v_TJU, rows.offsets, rows.offsets, window)


def prefixed_attention(
    q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor, rows: PrefixedRows, window: Window = None, sinks_H: Sinks = None
) -> Tensor:
    # The place of a band among rows with more keys than queries isn't documented.
    if window is not None or sinks_H is not None:
        return padded_prefixed_attention(q_THK, k_TJK, v_TJU, rows, window, sinks_H)
    num_first, packed = rows.num_first, rows.packed(q_THK.device)
    first = packed_attention(q_THK[:num_first], k_TJK[:num_first], v_TJU[:num_first], rows.first)
    keys, values = (copy_rows(heads, packed.keys) for heads in (k_TJK, v_TJU))
    # The causal mode lets the last query of a row see its last key.
    behind = _attend_rows(q_THK[num_first:], keys, values, packed.offsets, packed.rows.offsets)
    return torch.cat((first, behind))


def _attend_rows(
    q_THK: Tensor,
    k_TJK: Tensor,
    v_TJU: Tensor,
    offsets: Sequence[int],
    key_offsets: Sequence[int],
    window: Window = None,
) -> Tensor:
    values = pad_values(k_TJK, v_TJU)
    attended = []
    for first in range(0, len(offsets) - 1, _MOST_ROWS):
        ends, key_ends = (bounds[first : first + _MOST_ROWS + 1] for bounds in (offsets, key_offsets))
        queries, keys = (slice(bounds[0], bounds[-1]) for bounds in (ends, key_ends))
        heads = (q_THK[queries], k_TJK[keys], values[keys])
        attended.append(_attend(*heads, _from_0(ends), _from_0(key_ends), window))
    attended_THK = attended[0] if len(attended) == 1 else torch.cat(attended)
    return attended_THK[..., : v_TJU.shape[-1]]


def _from_0(offsets: Sequence[int]) -> list[int]:
    """Return the ends of rows relative to the first one's start."""
    return [offset - offsets[0] for offset in offsets[1:]]


def _attend(
    q_THK: Tensor, k_TJK: Tensor, v_TJK: Tensor, row_ends: list[int], key_ends: list[int], window: Window
) -> Tensor:
    mode = {"sparse_mode": _CAUSAL_MODE}
    if window is not None:
        mode = {"sparse_mode": _BAND_MODE, "pre_tockens": window - 1, "next_tockens": 0}
    attended_THK, *_ = _operators().npu_fusion_attention(
        q_THK,
        k_TJK,
        v_TJK,
        q_THK.shape[1],
        "TND",
        atten_mask=_triangle(q_THK.device),
        scale=q_THK.shape[-1] ** -0.5,
        actual_seq_qlen=row_ends,
        actual_seq_kvlen=key_ends,
        **mode,
    )
    return attended_THK


@cache
def _triangle(device: torch.device) -> Tensor:
    return torch.ones(_TRIANGLE_SIZE, _TRIANGLE_SIZE, dtype=torch.bool, device=device).triu(1)
