"""Operations on a CPU.

Shape letters: `M` rows, `D` inputs and `O` outputs of a linear layer, `E` experts, `T` packed tokens, `H` query heads,
`J` key and value heads, `K` head size of queries and keys, `U` head size of values, `B` rows, `C` blocks of a table.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.models.kernels import plain
from spmdrl.engines.models.kernels.cpp.cpu_library import cpu_library
from spmdrl.engines.models.kernels.packed import PackedRows, padded_attention


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # The same bits in fewer operations, where nothing is rounded in between.
    if not x.dtype == weight.dtype == torch.float32:
        return plain.rms_norm(x, weight, eps)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _RmsNorm.apply(x, weight, eps)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


class _RmsNorm(torch.autograd.Function):
    """F.rms_norm in float32; its backward in 7 passes over the values where autograd's takes 17."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, scale = torch.ops.aten._fused_rms_norm(x, x.shape[-1:], weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # With n = s x and y = w n: dL/dw = sum g n, dL/dx = s (g w - n mean(g w n)).
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        by_weight = (gradient * normed).flatten(0, -2)
        by_x = None
        if ctx.needs_input_grad[0]:
            mean = (by_weight @ weight).view(scale.shape) / x.shape[-1]
            by_x = (gradient * weight).addcmul_(normed, mean, value=-1).mul_(scale)
        return by_x, by_weight.sum(0) if ctx.needs_input_grad[1] else None, None


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if heads.dtype != torch.float32:
        return plain.rotate(heads, cos, sin)
    if torch.is_grad_enabled() and heads.requires_grad:
        return _Rotate.apply(heads, cos, sin)
    return _turned(heads, cos, sin)


class _Rotate(torch.autograd.Function):
    """Backward turns the other way, which takes what forward does; autograd's takes twice that."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(heads, cos, sin)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turned(gradient, cos, -sin), None, None


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The bits of `plain.rotate` in fewer passes: whole heads are multiplied, as halves of them are short runs."""
    first, second = heads.chunk(2, dim=-1)
    crossed = torch.cat((second, first), dim=-1).mul_(torch.cat((-sin, sin), dim=-1))
    return (heads * torch.cat((cos, cos), dim=-1)).add_(crossed)


def grouped_linear(rows_MD: Tensor, weights_EOD: Tensor, counts_E: Tensor) -> Tensor:
    # Forward and backward take 10 to 40% less time than a loop of linear layers, most with many experts.
    if plain.grouped_mm_takes(rows_MD, weights_EOD):
        return plain.grouped_mm_linear(rows_MD, weights_EOD, counts_E)
    return plain.grouped_linear(rows_MD, weights_EOD, counts_E)


def add_matmul(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return out.addmm_(a.to(out.dtype).T, b.to(out.dtype))


def packed_attention(q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor, rows: PackedRows) -> Tensor:
    return padded_attention(q_THK, k_TJK, v_TJU, rows.padded(q_THK.device))


class _PageSizes(ctypes.Structure):
    """Sizes in the library's order."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("rows", "heads", "kv_heads", "key_size", "value_size", "block_size", "table_size", "threads")
    ]


_PAGE_READERS = {torch.float32: "paged_attention_float32", torch.bfloat16: "paged_attention_bfloat16"}


def reads_pages(dtype: torch.dtype | None) -> bool:
    """Whether the library has attention over pages, of this dtype or at all; PyTorch has none."""
    return (dtype is None or dtype in _PAGE_READERS) and cpu_library() is not None


def paged_attention(q_BHK: Tensor, keys: Tensor, values: Tensor, tables_BC: Tensor, lengths_B: Tensor) -> Tensor:
    library = cpu_library()
    if library is None or q_BHK.dtype not in _PAGE_READERS:
        return plain.paged_attention(q_BHK, keys, values, tables_BC, lengths_B)
    assert keys.is_contiguous() and values.is_contiguous(), "pages lie in one piece"
    (num_rows, num_heads, key_size), (_, num_kv_heads, block_size, value_size) = q_BHK.shape, values.shape
    q_BHK, tables_BC, lengths_B = q_BHK.contiguous(), tables_BC.contiguous(), lengths_B.contiguous()
    out_BHU = q_BHK.new_empty(num_rows, num_heads, value_size)
    sizes = _PageSizes(
        num_rows, num_heads, num_kv_heads, key_size, value_size, block_size, tables_BC.shape[1], torch.get_num_threads()
    )
    inputs = [ctypes.c_void_p(x.data_ptr()) for x in (q_BHK, keys, values, tables_BC, lengths_B)]
    attend = getattr(library, _PAGE_READERS[q_BHK.dtype])
    if not attend(*inputs, ctypes.byref(sizes), ctypes.c_void_p(out_BHU.data_ptr())):
        raise MemoryError(f"no memory for the scores of {num_rows} rows of at most {int(lengths_B.max())} positions")
    return out_BHU
