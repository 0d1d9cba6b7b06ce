"""Operations on CUDA: torch's fused ones, and liger-kernel's if installed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.models.kernels import plain
from spmdrl.engines.models.kernels.packed import PackedRows, pad_values, padded_attention
from spmdrl.engines.models.kernels.prefixed import PrefixedRows, copy_rows, padded_prefixed_attention

try:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction
except ImportError:
    LigerRMSNormFunction = LigerSiLUMulFunction = None

_HALF = (torch.bfloat16, torch.float16)
# Requirements of flash attention on devices and heads.
_FLASH_CAPABILITY = (8, 0)
_FLASH_LARGEST_HEAD = 256
_FLASH_HEAD_MULTIPLE = 8
# torch's grouped matrix product requires the same devices, and bfloat16.
_GROUPED_CAPABILITY = (8, 0)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype != weight.dtype:
        return plain.rms_norm(x, weight, eps)
    if LigerRMSNormFunction is not None:
        # Out of place, because the residual stream reads the same gradient.
        return LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    if LigerSiLUMulFunction is not None and gate.numel():
        return LigerSiLUMulFunction.apply(gate, up)
    return plain.swiglu(gate, up)


def grouped_linear(rows_MD: Tensor, weights_EOD: Tensor, counts_E: Tensor) -> Tensor:
    capable = torch.cuda.get_device_capability(rows_MD.device) >= _GROUPED_CAPABILITY
    if rows_MD.dtype == torch.bfloat16 and capable and plain.grouped_mm_takes(rows_MD, weights_EOD):
        return plain.grouped_mm_linear(rows_MD, weights_EOD, counts_E)
    return plain.grouped_linear(rows_MD, weights_EOD, counts_E)


def add_matmul(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    if a.dtype in _HALF and a.dtype == b.dtype:
        return torch.addmm(out, a.T, b, out_dtype=out.dtype, out=out)
    return plain.add_matmul(out, a, b)


def packed_attention(q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor, rows: PackedRows) -> Tensor:
    if not rows.lengths or not _flash_can(q_THK):
        return padded_attention(q_THK, k_TJK, v_TJU, rows)
    ends = rows.cumulative(q_THK.device)
    return _flash(q_THK, k_TJK, v_TJU, (ends, ends, rows.longest, rows.longest))


def prefixed_attention(q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor, rows: PrefixedRows) -> Tensor:
    if not _flash_can(q_THK):
        return padded_prefixed_attention(q_THK, k_TJK, v_TJU, rows)
    num_first, packed = rows.num_first, rows.packed(q_THK.device)
    first = packed_attention(q_THK[:num_first], k_TJK[:num_first], v_TJU[:num_first], rows.first)
    keys, values = (copy_rows(heads, packed.keys) for heads in (k_TJK, v_TJU))
    bounds = (packed.ends, packed.rows.cumulative(q_THK.device), packed.longest, packed.rows.longest)
    # With fewer queries than keys, the last one sees the last key.
    return torch.cat((first, _flash(q_THK[num_first:], keys, values, bounds)))


def _flash(q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor, bounds: tuple[Tensor, Tensor, int, int]) -> Tensor:
    value_size = v_TJU.shape[-1]
    v_TJK = pad_values(k_TJK, v_TJU)
    # Only here: it imports Dynamo, which takes longer than the rest of PyTorch.
    from torch.nn.attention.varlen import varlen_attn

    parameters = _parameters(varlen_attn)
    # Torch 2.10 has a flag for causal masks and repeats no key heads; later releases have a window and a flag for them.
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in parameters else {"is_causal": True}
    if (share := q_THK.shape[1] // k_TJK.shape[1]) > 1:
        if "enable_gqa" in parameters:
            options["enable_gqa"] = True
        else:
            k_TJK, v_TJK = k_TJK.repeat_interleave(share, dim=1), v_TJK.repeat_interleave(share, dim=1)
    attended_THK: Any = varlen_attn(q_THK, k_TJK, v_TJK, *bounds, **options)
    return attended_THK[..., :value_size]


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _paged_attention(q_BHK: Tensor, keys: Tensor, values: Tensor, tables_BC: Tensor, lengths_B: Tensor) -> Tensor:
    # In torch's CUDA builds only.
    from spmdrl.engines.models.kernels import paged_kernel

    return paged_kernel.paged_attention(q_BHK, keys, values, tables_BC, lengths_B)


# Not varlen_attn, which takes block tables from 2.12 on, in blocks of 256 positions, and whose second version leaves
# rows unwritten where it splits them: https://github.com/pytorch/pytorch/issues/194167
paged_attention = plain.paged_attention if find_spec("triton") is None else _paged_attention


def _flash_can(q_THK: Tensor) -> bool:
    head_size = q_THK.shape[-1]
    return (
        q_THK.dtype in _HALF
        and head_size <= _FLASH_LARGEST_HEAD
        and head_size % _FLASH_HEAD_MULTIPLE == 0
        and torch.cuda.get_device_capability(q_THK.device) >= _FLASH_CAPABILITY
    )
