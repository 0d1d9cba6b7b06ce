"""Operations on a CPU: linear layers by oneDNN, which PyTorch leaves to MKL in float32, and paged attention.

A linear layer gives a row the same bits whatever is beside it, with blocked and plain weights.

Shape letters: `M` rows, `D` inputs and `O` outputs of a linear layer, `E` experts, `T` packed tokens, `H` query heads,
`J` key and value heads, `K` head size of queries and keys, `U` head size of values, `B` rows, `C` blocks of a table.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmdrl.engines.models.kernels import plain
from spmdrl.engines.models.kernels.cpp.cpu_library import cpu_library
from spmdrl.engines.models.kernels.packed import Sinks, Window

_PAGE_READERS = {torch.float32: "paged_attention_float32", torch.bfloat16: "paged_attention_bfloat16"}
# oneDNN's layout for this many rows is also the one for any greater number.
_EXPECTED_ROWS = 16
_BLOCKED_DTYPES = (torch.float32, torch.bfloat16)
_LEAST_ROWS = 2  # One alone would be rounded differently.
# The first product of a shape takes a third of a millisecond more, which smaller weights don't earn back.
_LEAST_WEIGHTS = 1 << 15
# MKL has slower loops for them: 66 to 100 GFLOP/s where oneDNN's products reach 100 to 110.
_VENDORS_SLOW_IN_MKL = ("AuthenticAMD", "HygonGenuine")


def grouped_linear(rows_MD: Tensor, weights_EOD: Tensor, counts_E: Tensor) -> Tensor:
    # Forward and backward take 10 to 40% less time than a loop of linear layers, most with many experts.
    if plain.grouped_mm_takes(rows_MD, weights_EOD):
        return plain.grouped_mm_linear(rows_MD, weights_EOD, counts_E)
    return plain.grouped_linear(rows_MD, weights_EOD, counts_E)


def add_matmul(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return out.addmm_(a.to(out.dtype).T, b.to(out.dtype))


class _PageSizes(ctypes.Structure):
    """Sizes in the library's order."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "rows", "heads", "kv_heads", "key_size", "value_size", "block_size", "table_size", "threads", "window"
        )
    ]  # fmt: skip


def reads_pages(dtype: torch.dtype | None) -> bool:
    """Return True if the library has paged attention, of this dtype or at all; PyTorch has none."""
    return (dtype is None or dtype in _PAGE_READERS) and cpu_library() is not None


def paged_attention(
    q_BHK: Tensor,
    keys: Tensor,
    values: Tensor,
    tables_BC: Tensor,
    lengths_B: Tensor,
    window: Window = None,
    sinks_H: Sinks = None,
) -> Tensor:
    library = cpu_library()
    if library is None or q_BHK.dtype not in _PAGE_READERS:
        return plain.paged_attention(q_BHK, keys, values, tables_BC, lengths_B, window, sinks_H)
    assert keys.is_contiguous() and values.is_contiguous(), "pages are contiguous"
    (num_rows, num_heads, key_size), (_, num_kv_heads, block_size, value_size) = q_BHK.shape, values.shape
    q_BHK, tables_BC, lengths_B = q_BHK.contiguous(), tables_BC.contiguous(), lengths_B.contiguous()
    out_BHU = q_BHK.new_empty(num_rows, num_heads, value_size)
    # Without a window a row's last positions are as many as its table holds.
    table_size = tables_BC.shape[1]
    sizes = _PageSizes(
        num_rows, num_heads, num_kv_heads, key_size, value_size, block_size, table_size, torch.get_num_threads(),
        table_size * block_size if window is None else window,
    )  # fmt: skip
    sinks_H = None if sinks_H is None else sinks_H.to(torch.float32).contiguous()
    inputs = [ctypes.c_void_p(x.data_ptr()) for x in (q_BHK, keys, values, tables_BC, lengths_B)]
    inputs.append(ctypes.c_void_p(None if sinks_H is None else sinks_H.data_ptr()))
    attend = getattr(library, _PAGE_READERS[q_BHK.dtype])
    if not attend(*inputs, ctypes.byref(sizes), ctypes.c_void_p(out_BHU.data_ptr())):
        raise MemoryError(f"no memory for the scores of {num_rows} rows of at most {int(lengths_B.max())} positions")
    return out_BHU


def linear(rows_MD: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Compute F.linear, by oneDNN if that is faster; the choice depends on the weight alone."""
    if rows_MD.ndim != 2 or not linear_takes(weight_OD):
        return plain.linear(rows_MD, weight_OD, bias_O)
    if not torch.is_grad_enabled():
        return _product(rows_MD, weight_OD, bias_O)
    return _Linear.apply(rows_MD, weight_OD, bias_O)


def linear_takes(weight_OD: Tensor) -> bool:
    """Return True if oneDNN computes this weight's products with gradients."""
    return weight_OD.dtype == torch.float32 and weight_OD.numel() >= _LEAST_WEIGHTS and _is_faster()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_MD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows_MD, weight_OD)
        return _product(rows_MD, weight_OD, bias_O)

    @staticmethod
    def backward(ctx: Any, by_out_MO: Tensor) -> tuple[Tensor | None, ...]:
        rows_MD, weight_OD = ctx.saved_tensors
        by_out_MO = by_out_MO.contiguous()
        by_rows, by_weight, by_bias = ctx.needs_input_grad
        return (
            _product(by_out_MO, weight_OD.T, None) if by_rows else None,
            # MKL is as fast here: oneDNN would have to transpose one of the two first.
            by_out_MO.T @ rows_MD if by_weight else None,
            by_out_MO.sum(0) if by_bias else None,
        )


def _product(rows_MD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
    num_rows = len(rows_MD)
    # oneDNN compiles about half a MiB of code per number of rows and never frees it: above 16, eight per power of 2.
    step = 1 << (num_rows - 1).bit_length() >> 4
    missing = -num_rows % max(step, _LEAST_ROWS if num_rows < _LEAST_ROWS else 1)
    if missing:
        rows_MD = torch.constant_pad_nd(rows_MD, (0, 0, 0, missing))
    out_MO = torch.ops.mkldnn._linear_pointwise(rows_MD, weight_OD, bias_O, "none", [], "")
    return out_MO[:num_rows] if missing else out_MO


@cache
def _is_faster() -> bool:
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):
        return False
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return False
    return any(line.startswith("vendor_id") and line.split()[-1] in _VENDORS_SLOW_IN_MKL for line in lines)


class BlockedLinear:
    """A linear layer for inference with a blocked weight, as oneDNN's products read it.

    With few rows a product is bound by reading the weight, and a blocked one streams through the caches in order. Its
    bits equal `linear`'s by oneDNN, but not F.linear's. The weight is copied, the bias isn't.
    """

    def __init__(self, weight_OD: Tensor, bias_O: Tensor | None):
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_OD.detach(), _EXPECTED_ROWS)
        self._bias_O = bias_O

    def __call__(self, rows_MD: Tensor) -> Tensor:
        return _product(rows_MD, self._weight, self._bias_O)

    @property
    def num_bytes(self) -> int:
        return self._weight.numel() * self._weight.dtype.itemsize

    def weight(self) -> Tensor:
        """Return the weight [O, D] in the usual layout."""
        return self._weight.to_dense()


def blocked_linear(weight_OD: Tensor, bias_O: Tensor | None) -> BlockedLinear | None:
    return BlockedLinear(weight_OD, bias_O) if blocked_linear_takes(weight_OD) else None


def blocked_linear_takes(weight_OD: Tensor) -> bool:
    """Return True if this build of PyTorch, and the CPU, have such products of the weight's dtype."""
    if not (torch.backends.mkldnn.is_available() and weight_OD.dtype in _BLOCKED_DTYPES):
        return False
    return weight_OD.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
