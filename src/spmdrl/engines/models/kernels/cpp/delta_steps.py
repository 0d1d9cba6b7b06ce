"""The gated delta rule and its convolution by the CPU's library, token by token, with the same bits in any company.

This takes a third of the time of chunks in plain PyTorch, which compute the gradients. Without the library and in other
dtypes they compute everything, and round differently in the last bits. Queries, keys and values in bfloat16 are
converted to float32 first.

Shape letters: those of `kernels/delta.py`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spmdrl.engines.models.kernels import delta
from spmdrl.engines.models.kernels.cpp.cpu_library import library_for
from spmdrl.engines.models.kernels.packed import PackedRows


class _Heads(ctypes.Structure):
    """Memory layout of a tensor's vectors [T, heads, size]."""

    _fields_ = [("numbers", ctypes.c_void_p), ("token_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64)]


class _Sizes(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("key_heads", "heads", "key_size", "value_size")),
        ("eps", ctypes.c_float),
    ]


class _Rows(ctypes.Structure):
    """Offsets of rows, or none for one token each, and the slots of their states, or none for one each in order."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("offsets", "slots")),
        *((name, ctypes.c_int64) for name in ("num", "threads")),
    ]


def causal_conv(values_TC: Tensor, weight_CW: Tensor, rows: PackedRows, before_BWC: Tensor | None = None) -> Tensor:
    before = () if before_BWC is None else (before_BWC,)
    library = library_for(values_TC, weight_CW, *before)
    if library is None:
        return delta.causal_conv(values_TC, weight_CW, rows, before_BWC)

    def compute(values_TC: Tensor, weight_CW: Tensor, before_BWC: Tensor | None) -> Tensor:
        columns = delta.columns_or_zeros(before_BWC, values_TC, rows, weight_CW.shape[1] - 1)
        columns = columns.clone(memory_format=torch.contiguous_format)
        return _mix(library, values_TC, weight_CW, columns, _rows_of(rows))

    return _WithPlainGradient.apply(compute, delta.causal_conv, rows, values_TC, weight_CW, before_BWC)


def gated_delta(
    q_TGK: Tensor, k_TGK: Tensor, v_THU: Tensor, log_decay_TH: Tensor, beta_TH: Tensor, rows: PackedRows,
    before_BHKU: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    inputs = [_widened(x) for x in (q_TGK, k_TGK, v_THU, log_decay_TH, beta_TH)]
    library = library_for(*inputs, *(() if before_BHKU is None else (before_BHKU,)))
    if library is None:
        return delta.gated_delta(q_TGK, k_TGK, v_THU, log_decay_TH, beta_TH, rows, before_BHKU)

    def compute(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, before: Tensor | None) -> Any:
        states = delta.no_states(k, v, rows) if before is None else before.clone(memory_format=torch.contiguous_format)
        return _pass(library, (q, k, v), (log_decay, beta), states, _rows_of(rows)), states

    out, after = _WithPlainGradient.apply(compute, delta.gated_delta, rows, *inputs, before_BHKU)
    return out.to(v_THU.dtype), after


class _WithPlainGradient(torch.autograd.Function):
    """An operation on rows and what is before them, whose gradient comes from another computation of it."""

    @staticmethod
    def forward(
        ctx: Any, compute: Callable[..., Any], plain: Callable[..., Any], rows: PackedRows, *inputs: Tensor | None
    ) -> Any:
        ctx.plain, ctx.rows = plain, rows
        ctx.save_for_backward(*inputs)
        return compute(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[3:]
        pairs = zip(ctx.saved_tensors, needed, strict=True)
        inputs: list[Any] = [None if x is None else x.detach().requires_grad_(needs) for x, needs in pairs]
        with torch.enable_grad():
            found = ctx.plain(*inputs[:-1], ctx.rows, inputs[-1])
        both = zip([found] if isinstance(found, Tensor) else found, gradients, strict=True)
        results, by_results = zip(*(pair for pair in both if pair[0].requires_grad), strict=True)
        leaves = [x for x, needs in zip(inputs, needed, strict=True) if needs]
        by_leaves = iter(torch.autograd.grad(results, leaves, by_results))
        return None, None, None, *(next(by_leaves) if needs else None for needs in needed)


def conv_step(values_BC: Tensor, weight_CW: Tensor, columns_SWC: Tensor, slots_B: Tensor) -> Tensor:
    library = library_for(values_BC, weight_CW, columns_SWC)
    if library is None:
        return delta.conv_step(values_BC, weight_CW, columns_SWC, slots_B)
    return _mix(library, values_BC, weight_CW, columns_SWC, _rows_at(slots_B))


def gated_delta_step(
    q_BGK: Tensor, k_BGK: Tensor, v_BHU: Tensor, log_decay_BH: Tensor, beta_BH: Tensor,
    states_SHKU: Tensor, slots_B: Tensor,
) -> Tensor:  # fmt: skip
    q, k, v, log_decay, beta = (_widened(x) for x in (q_BGK, k_BGK, v_BHU, log_decay_BH, beta_BH))
    library = library_for(q, k, v, log_decay, beta, states_SHKU)
    if library is None:
        return delta.gated_delta_step(q_BGK, k_BGK, v_BHU, log_decay_BH, beta_BH, states_SHKU, slots_B)
    out = _pass(library, (q, k, v), (log_decay, beta), states_SHKU, _rows_at(slots_B))
    return out.to(v_BHU.dtype)


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.float32) if x.dtype == torch.bfloat16 else x


def _rows_of(rows: PackedRows) -> _Rows:
    ends = rows.cumulative(torch.device("cpu"))
    return _Rows(ends.data_ptr(), None, len(rows.lengths), torch.get_num_threads())


def _rows_at(slots_B: Tensor) -> _Rows:
    assert slots_B.dtype == torch.int64 and slots_B.is_contiguous(), (slots_B.dtype, slots_B.stride())
    return _Rows(None, slots_B.data_ptr(), len(slots_B), torch.get_num_threads())


def _pass(
    library: ctypes.CDLL,
    heads: tuple[Tensor, Tensor, Tensor],
    rates: tuple[Tensor, Tensor],
    states: Tensor,
    rows: _Rows,
) -> Tensor:
    """Return the outputs [T, H, U] of queries, keys and values; log decays and betas are the rates."""
    assert states.is_contiguous(), "states are changed in place"
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in heads)
    log_decay, beta = (x.contiguous() for x in rates)
    out_THU = torch.empty(v.shape, dtype=v.dtype)
    layouts = (_Heads * 3)(*(_Heads(x.data_ptr(), *x.stride()[:2]) for x in (q, k, v)))
    sizes = _sizes(k.shape[1], *states.shape[1:])
    places = (states.data_ptr(), out_THU.data_ptr())
    if not library.gated_delta(layouts, log_decay.data_ptr(), beta.data_ptr(), sizes, ctypes.byref(rows), *places):
        raise MemoryError(f"no memory for the keys of rows among {len(v)} tokens")
    return out_THU


@functools.lru_cache(maxsize=64)
def _sizes(*sizes: int) -> Any:
    return ctypes.byref(_Sizes(*sizes, delta.EPS))


def _mix(library: ctypes.CDLL, values_TC: Tensor, weight_CW: Tensor, columns: Tensor, rows: _Rows) -> Tensor:
    """Return the convolution [T, C]; the columns become the rows' last ones."""
    assert columns.is_contiguous(), "columns are changed in place"
    values = values_TC if values_TC.stride(-1) == 1 else values_TC.contiguous()
    weight = weight_CW.contiguous()
    out_TC = torch.empty(values.shape, dtype=values.dtype)
    rows_and_places = (ctypes.byref(rows), columns.data_ptr(), out_TC.data_ptr())
    library.causal_conv(values.data_ptr(), values.stride(0), weight.data_ptr(), *weight.shape, *rows_and_places)
    return out_TC
