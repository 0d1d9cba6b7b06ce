"""Operations on CUDA: torch's fused ones, our own in Triton, and flash-linear-attention's if installed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.models.kernels import delta, plain
from spmdrl.engines.models.kernels.packed import (
    PackedRows,
    Sinks,
    Window,
    join_sinks,
    pad_values,
    padded_attention,
    sinks_backward,
)
from spmdrl.engines.models.kernels.prefixed import PrefixedRows, copy_rows, padded_prefixed_attention

_HALF = (torch.bfloat16, torch.float16)
# Older releases of Triton compute wrong gradients of the gated delta rule on Hopper, and its backward raises there:
# https://github.com/fla-org/flash-linear-attention/issues/640
_HOPPER_TRITON = (3, 7, 1)
Bounds = tuple[Tensor, Tensor, int, int]
"""Offsets of the rows' queries and of their keys, int32, with the largest number of each."""
# Requirements of flash attention on devices and heads.
_FLASH_CAPABILITY = (8, 0)
_FLASH_LARGEST_HEAD = 256
_FLASH_HEAD_MULTIPLE = 8
# torch's grouped matrix product requires the same devices, and bfloat16.
_GROUPED_CAPABILITY = (8, 0)
_PLANNED_CAPABILITY = (9, 0)
KINDS = ("cuda", "planned")
"""Kinds of device with these operations."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype != weight.dtype:
        return plain.rms_norm(x, weight, eps)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def grouped_linear(rows_MD: Tensor, weights_EOD: Tensor, counts_E: Tensor) -> Tensor:
    capable = _capability(rows_MD.device) >= _GROUPED_CAPABILITY
    if rows_MD.dtype == torch.bfloat16 and capable and plain.grouped_mm_takes(rows_MD, weights_EOD):
        return plain.grouped_mm_linear(rows_MD, weights_EOD, counts_E)
    return plain.grouped_linear(rows_MD, weights_EOD, counts_E)


def add_matmul(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    if a.dtype in _HALF and a.dtype == b.dtype:
        return torch.addmm(out, a.T, b, out_dtype=out.dtype, out=out)
    return plain.add_matmul(out, a, b)


def packed_attention(
    q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor, rows: PackedRows, window: Window = None, sinks_H: Sinks = None
) -> Tensor:
    if not rows.lengths or not flash_can(q_THK):
        return padded_attention(q_THK, k_TJK, v_TJU, rows, window, sinks_H)
    ends = rows.cumulative(q_THK.device)
    return _flash(q_THK, k_TJK, v_TJU, (ends, ends, rows.longest, rows.longest), window, sinks_H)


def prefixed_attention(
    q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor, rows: PrefixedRows, window: Window = None, sinks_H: Sinks = None
) -> Tensor:
    if not flash_can(q_THK):
        return padded_prefixed_attention(q_THK, k_TJK, v_TJU, rows, window, sinks_H)
    num_first, packed = rows.num_first, rows.packed(q_THK.device)
    q, k, v = (heads[:num_first] for heads in (q_THK, k_TJK, v_TJU))
    first = packed_attention(q, k, v, rows.first, window, sinks_H)
    keys, values = (copy_rows(heads, packed.keys) for heads in (k_TJK, v_TJU))
    bounds = (packed.ends, packed.rows.cumulative(q_THK.device), packed.longest, packed.rows.longest)
    # With fewer queries than keys, the last one sees the last key.
    return torch.cat((first, _flash(q_THK[num_first:], keys, values, bounds, window, sinks_H)))


def _flash(q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor, bounds: Bounds, window: Window, sinks_H: Sinks) -> Tensor:
    return _Flash.apply(q_THK, k_TJK, pad_values(k_TJK, v_TJU), bounds, window, sinks_H)[..., : v_TJU.shape[-1]]


# torch.nn.attention.varlen, which uses the same kernels, drops the gradient of its logsumexps, has no window in torch
# 2.10, repeats key heads before 2.12, and imports Dynamo, which takes longer than the rest of PyTorch.
class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_THK: Tensor, k_TJK: Tensor, v_TJK: Tensor, bounds: Bounds, window: Window, sinks_H: Sinks
    ) -> Tensor:
        out_THK, lse_TH = flash_forward((q_THK, k_TJK, v_TJK), bounds, is_causal=True, window=window)
        if sinks_H is not None:
            out_THK, lse_TH = join_sinks(out_THK, lse_TH, sinks_H)
        ctx.save_for_backward(q_THK, k_TJK, v_TJK, out_THK, lse_TH, sinks_H)
        ctx.bounds, ctx.window = bounds, window
        return out_THK

    @staticmethod
    def backward(ctx: Any, by_out_THK: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, out_THK, lse_TH, sinks_H = ctx.saved_tensors
        whole, by_out_THK = (out_THK, lse_TH), by_out_THK.contiguous()
        by_inputs = flash_backward(by_out_THK, inputs, whole, ctx.bounds, is_causal=True, window=ctx.window)
        by_sinks = None if sinks_H is None else sinks_backward(by_out_THK, whole, sinks_H)
        return *by_inputs, None, None, by_sinks


def flash_forward(
    inputs: Sequence[Tensor], bounds: Bounds, *, is_causal: bool, window: Window = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return output [T, H, K] and logsumexp [T, H] of queries [T, H, K], keys and values [S, J, K]."""
    out_THK, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
        *inputs, *bounds, 0.0, is_causal and window is None, False, scale=scale, **_window_sizes(window)
    )
    return out_THK, lse_HT.T


def flash_backward(
    by_out_THK: Tensor,
    inputs: Sequence[Tensor],
    whole: tuple[Tensor, Tensor],
    bounds: Bounds,
    *,
    is_causal: bool,
    window: Window = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of queries, keys and values, from output and logsumexp of the whole softmax."""
    out_THK, lse_TH = whole
    # The random state is for dropout only.
    random_state = torch.zeros(2, dtype=torch.uint64, device=by_out_THK.device)
    unused = torch.empty(0, device=by_out_THK.device)
    return torch.ops.aten._flash_attention_backward(
        by_out_THK, *inputs, out_THK, lse_TH.T.contiguous(), *bounds, 0.0, is_causal and window is None, random_state,
        unused, scale=scale, **_window_sizes(window),
    )  # fmt: skip


def _window_sizes(window: Window) -> dict[str, int]:
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def gated_delta(
    q_TGK: Tensor, k_TGK: Tensor, v_THU: Tensor, log_decay_TH: Tensor, beta_TH: Tensor, rows: PackedRows,
    before_BHKU: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not rows.lengths or v_THU.dtype not in _HALF or _delta_kernels() is None:
        return delta.gated_delta(q_TGK, k_TGK, v_THU, log_decay_TH, beta_TH, rows, before_BHKU)
    # Always with an initial state, because a row's bits depend on its presence.
    before = delta.no_states(k_TGK, v_THU, rows) if before_BHKU is None else before_BHKU
    out, after = _delta_kernels().chunk_gated_delta_rule(
        *(x[None] for x in (*_per_value_head(q_TGK, k_TGK, v_THU), v_THU, log_decay_TH, beta_TH)),
        initial_state=before,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=rows.cumulative(v_THU.device).to(torch.int64),
    )
    return out[0], after


def gated_delta_step(
    q_BGK: Tensor, k_BGK: Tensor, v_BHU: Tensor, log_decay_BH: Tensor, beta_BH: Tensor,
    states_SHKU: Tensor, slots_B: Tensor,
) -> Tensor:  # fmt: skip
    inputs = (q_BGK, k_BGK, v_BHU, log_decay_BH, beta_BH)
    if v_BHU.dtype not in _HALF or _delta_kernels() is None:
        return delta.gated_delta_step(*inputs, states_SHKU, slots_B)
    q_BHK, k_BHK = _per_value_head(q_BGK, k_BGK, v_BHU)
    out, states_SHKU[slots_B] = _delta_kernels().fused_recurrent_gated_delta_rule(
        *(x[:, None] for x in (q_BHK, k_BHK, v_BHU)),
        g=log_decay_BH[:, None],
        beta=beta_BH[:, None],
        initial_state=states_SHKU[slots_B],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out[:, 0]


@cache
def _delta_kernels() -> Any:
    # Only here: it compiles for the device that it finds.
    try:
        import triton
        from fla.ops import gated_delta_rule
    except ImportError:
        return None
    release = tuple(int(number) for number in re.findall("[0-9]+", triton.__version__)[:3])
    is_wrong = torch.cuda.get_device_capability()[0] == 9 and release < _HOPPER_TRITON
    return None if is_wrong else gated_delta_rule


def _per_value_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    # Older releases of the chunked kernel repeat no key heads.
    share = v.shape[1] // k.shape[1]
    return q.repeat_interleave(share, dim=1), k.repeat_interleave(share, dim=1)


def _in_triton(name: str) -> Callable[..., Any]:
    """Return the operation in Triton, which torch's CUDA builds have; without it, and in float64, the plain one."""
    if find_spec("triton") is None:
        return getattr(plain, name)

    def call(*arguments: Any) -> Any:
        if arguments[0].dtype == torch.float64:
            return getattr(plain, name)(*arguments)
        # Only here: a CPU's build can't import them.
        from spmdrl.engines.models.kernels import fused_kernels, paged_kernel

        return getattr(paged_kernel if name == "paged_attention" else fused_kernels, name)(*arguments)

    return call


rotate, swiglu, invert_cdf = map(_in_triton, ("rotate", "swiglu", "invert_cdf"))
exponential_sums, minus_expected = map(_in_triton, ("exponential_sums", "minus_expected"))
# Not varlen_attn, which takes block tables from 2.12 on, in blocks of 256 positions, and whose second version leaves
# rows unwritten where it splits them: https://github.com/pytorch/pytorch/issues/194167
paged_attention = _in_triton("paged_attention")


def flash_can(q_THK: Tensor) -> bool:
    """Return True if flash attention takes these queries."""
    head_size = q_THK.shape[-1]
    return (
        q_THK.dtype in _HALF
        and head_size <= _FLASH_LARGEST_HEAD
        and head_size % _FLASH_HEAD_MULTIPLE == 0
        and _capability(q_THK.device) >= _FLASH_CAPABILITY
    )


def _capability(device: torch.device) -> tuple[int, int]:
    # A device that is only planned for has no driver.
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else _PLANNED_CAPABILITY
