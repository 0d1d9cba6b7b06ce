"""Norm, rotation, SwiGLU and the head's sums by the CPU's library in float32, each reading its inputs once.

Without the library and in other dtypes PyTorch's operations run, which round differently in the last bits. A process
uses one of the two for all passes, so generation and training have the same rounding.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from spmdrl.engines.models.kernels import plain
from spmdrl.engines.models.kernels.cpp.cpu_library import RowLayout, library_for


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    library = library_for(x, weight)
    if library is None:
        return plain.rms_norm(x, weight, eps)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _Normed.apply(library, x, weight, eps)
    return _normed(library, _in_runs(x), weight.contiguous(), eps, None)


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, library: ctypes.CDLL, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, weight = _in_runs(x), weight.contiguous()
        scales = x.new_empty(x.shape[:-1])
        ctx.library = library
        ctx.save_for_backward(x, weight, scales)
        return _normed(library, x, weight, eps, scales)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scales = ctx.saved_tensors
        # Named until the call is over, since a tensor with only its address in use is freed.
        gradient = gradient.contiguous()
        by_x, by_weight = _new_like(x), torch.zeros_like(weight)
        inputs = (tensor.data_ptr() for tensor in (x, weight, gradient, scales))
        if not ctx.library.rms_norm_backward(*inputs, _layout(x), by_x.data_ptr(), by_weight.data_ptr()):
            raise MemoryError(f"no memory for the gradient of a norm over {scales.numel()} vectors of {len(weight)}")
        return None, by_x, by_weight, None


def _normed(library: ctypes.CDLL, x: Tensor, weight: Tensor, eps: float, scales: Tensor | None) -> Tensor:
    out = _new_like(x)
    place = None if scales is None else scales.data_ptr()
    library.rms_norm(x.data_ptr(), weight.data_ptr(), eps, _layout(x), out.data_ptr(), place)
    return out


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    library = library_for(heads, cos)
    if library is None:
        return plain.rotate(heads, cos, sin)
    if torch.is_grad_enabled() and heads.requires_grad:
        return _Rotated.apply(library, heads, cos, sin)
    return _rotated(library, 1.0, heads, cos, sin)


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, library: ctypes.CDLL, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.library = library
        ctx.save_for_backward(cos, sin)
        return _rotated(library, 1.0, heads, cos, sin)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, _rotated(ctx.library, -1.0, gradient, *ctx.saved_tensors), None, None


def _rotated(library: ctypes.CDLL, sign: float, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [T, H, K] by their tokens' angles, or back if the sign is -1."""
    heads, cos, sin = _in_runs(heads), cos.contiguous(), sin.contiguous()
    out = _new_like(heads)
    library.rotate(heads.data_ptr(), cos.data_ptr(), sin.data_ptr(), sign, _layout(heads), out.data_ptr())
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    library = library_for(gate, up)
    if library is None:
        return plain.swiglu(gate, up)
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return _Gated.apply(library, gate, up)
    return _gated(library, *_alike(gate, up))


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, library: ctypes.CDLL, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = _alike(gate, up)
        ctx.library = library
        ctx.save_for_backward(gate, up)
        return _gated(library, gate, up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        gradient, by_gate, by_up = gradient.contiguous(), _new_like(gate), _new_like(up)
        inputs = (gate.data_ptr(), up.data_ptr(), gradient.data_ptr())
        ctx.library.swiglu_backward(*inputs, _layout(gate), by_gate.data_ptr(), by_up.data_ptr())
        return None, by_gate, by_up


def _gated(library: ctypes.CDLL, gate: Tensor, up: Tensor) -> Tensor:
    out = _new_like(gate)
    library.swiglu(gate.data_ptr(), up.data_ptr(), _layout(gate), out.data_ptr())
    return out


def _in_runs(x: Tensor) -> Tensor:
    """Return the values with contiguous rows, in at most two dims of rows."""
    return x if x.dim() in (2, 3) and x.stride(-1) == 1 else x.contiguous()


def _alike(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = _in_runs(gate), _in_runs(up)
    return (gate, up) if gate.stride() == up.stride() else (gate.contiguous(), up.contiguous())


def _new_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype)


def _layout(x: Tensor) -> Any:
    """Return the memory layout of a tensor's rows for the library."""
    *dims, size = x.shape
    if len(dims) == 2:
        return _row_layout(*dims, size, x.stride(0), x.stride(1), torch.get_num_threads())
    num_rows, stride = (dims[0], x.stride(0)) if len(dims) == 1 else (x.numel() // max(size, 1), size)
    return _row_layout(num_rows, 1, size, stride, 0, torch.get_num_threads())


# Most layers of a step have the same.
@functools.lru_cache(maxsize=256)
def _row_layout(*sizes: int) -> Any:
    return ctypes.byref(RowLayout(*sizes))


def exponential_sums(logits_CV: Tensor, highest_C: Tensor) -> tuple[Tensor, Tensor]:
    library = library_for(logits_CV, highest_C)
    if library is None or not logits_CV.is_contiguous():
        return plain.exponential_sums(logits_CV, highest_C)
    highest_C = highest_C.contiguous()
    sum_C, weighted_C = torch.empty_like(highest_C), torch.empty_like(highest_C)
    sizes = (*logits_CV.shape, torch.get_num_threads())
    library.exponential_sums(
        logits_CV.data_ptr(), highest_C.data_ptr(), *sizes, sum_C.data_ptr(), weighted_C.data_ptr()
    )
    return sum_C, weighted_C


def minus_expected(
    above_CV: Tensor, log_sum_C: Tensor, entropy_C: Tensor, by_logprob_C: Tensor | None, by_entropy_C: Tensor | None
) -> Tensor:
    rows = [None if x is None else x.contiguous() for x in (log_sum_C, entropy_C, by_logprob_C, by_entropy_C)]
    library = library_for(above_CV, *(row for row in rows if row is not None))
    if library is None or not above_CV.is_contiguous():
        return plain.minus_expected(above_CV, log_sum_C, entropy_C, by_logprob_C, by_entropy_C)
    places = [None if row is None else row.data_ptr() for row in rows]
    library.minus_expected(above_CV.data_ptr(), *places, *above_CV.shape, torch.get_num_threads())
    return above_CV
