"""Attention inside packed rows by the CPU's library in float32, without padding or copies of shared prefixes.

bfloat16 is converted to float32 first, at a fraction of the time of PyTorch's attention. Without the library and in
other dtypes PyTorch's attention over padded blocks runs, which is slower and rounds differently in the last bits.

Shape letters: `T` packed tokens, `H` query heads, `J` key and value heads, `K` head size of queries and keys, `U` head
size of values.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spmdrl.engines.models.kernels.cpp.cpu_library import library_for
from spmdrl.engines.models.kernels.packed import PackedRows, RowTable, Sinks, Window, padded_attention, sinks_backward
from spmdrl.engines.models.kernels.prefixed import PrefixedRows, padded_prefixed_attention

# More than any row's length.
_NO_WINDOW = 1 << 62


def packed_attention(
    q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor, rows: PackedRows, window: Window = None, sinks_H: Sinks = None
) -> Tensor:
    q, k, v = (_widened(heads) for heads in (q_THK, k_TJK, v_TJU))
    library = library_for(q, k, v)
    if library is None:
        return padded_attention(q_THK, k_TJK, v_TJU, rows, window, sinks_H)
    return _attend(library, q, k, v, rows.table, window, sinks_H).to(q_THK.dtype)


def prefixed_attention(
    q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor, rows: PrefixedRows, window: Window = None, sinks_H: Sinks = None
) -> Tensor:
    q, k, v = (_widened(heads) for heads in (q_THK, k_TJK, v_TJU))
    library = library_for(q, k, v)
    if library is None:
        return padded_prefixed_attention(q_THK, k_TJK, v_TJU, rows, window, sinks_H)
    return _attend(library, q, k, v, rows.table, window, sinks_H).to(q_THK.dtype)


def _widened(heads: Tensor) -> Tensor:
    return heads.to(torch.float32) if heads.dtype == torch.bfloat16 else heads


def cached_attention(
    q_BHK: Tensor,
    keys: Tensor,
    values: Tensor,
    tables_BC: Tensor,
    lengths_B: Tensor,
    window: Window = None,
    sinks_H: Sinks = None,
) -> Tensor:
    """Compute `ops.paged_attention` in float32, with the bits of `packed_attention` for a whole row's token."""
    library = library_for(q_BHK, keys, values)
    assert library is not None, "compute_batch_invariantly demands the library"
    assert keys.is_contiguous() and values.is_contiguous(), "pages are contiguous"
    (num_rows, num_heads, key_size), (_, num_kv_heads, block_size, value_size) = q_BHK.shape, values.shape
    q_BHK, tables_BC, lengths_B = _in_runs(q_BHK), tables_BC.contiguous(), lengths_B.contiguous()
    out_BHU = q_BHK.new_empty(num_rows, num_heads, value_size)
    # Strides of the first head, whose places are consecutive within a block.
    cached = (_Heads(x.data_ptr(), x.shape[-1], block_size * x.shape[-1]) for x in (keys, values))
    heads = (_Heads * 3)(_Heads(q_BHK.data_ptr(), q_BHK.stride(0), q_BHK.stride(1)), *cached)
    sinks_H = _sinks_of(sinks_H)
    shape = _Shape(num_heads, num_kv_heads, key_size, value_size, 0, 1, *_seen(window, sinks_H))
    sizes = (num_rows, tables_BC.shape[1], block_size)
    places = (tables_BC.data_ptr(), lengths_B.data_ptr(), *sizes, out_BHU.data_ptr())
    if not library.cached_attention(heads, ctypes.byref(shape), *places):
        raise MemoryError(f"no memory for the scores of rows of at most {int(lengths_B.max())} positions")
    return out_BHU


def _attend(
    library: ctypes.CDLL, q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor, table: RowTable, window: Window, sinks_H: Sinks
) -> Tensor:
    sinks_H = _sinks_of(sinks_H)
    trained = (q_THK, k_TJK, v_TJU, *([] if sinks_H is None else [sinks_H]))
    if torch.is_grad_enabled() and any(x.requires_grad for x in trained):
        return _Attention.apply(library, q_THK, k_TJK, v_TJU, table, window, sinks_H)
    return _attended(library, [_in_runs(x) for x in (q_THK, k_TJK, v_TJU)], table, None, window, sinks_H)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        library: ctypes.CDLL,
        q_THK: Tensor,
        k_TJK: Tensor,
        v_TJU: Tensor,
        table: RowTable,
        window: Window,
        sinks_H: Sinks,
    ) -> Tensor:
        inputs = [_in_runs(x) for x in (q_THK, k_TJK, v_TJU)]
        # The highest score of each query, and one over its sum of exponentials.
        stats = q_THK.new_empty(*q_THK.shape[:2], 2)
        out = _attended(library, inputs, table, stats, window, sinks_H)
        ctx.library, ctx.table, ctx.window = library, table, window
        ctx.save_for_backward(*inputs, out, stats, sinks_H)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q_THK, k_TJK, v_TJU, out, stats, sinks_H = ctx.saved_tensors
        # Named until the call is over, since a tensor with only its address in use is freed.
        gradient = _in_runs(gradient)
        by_queries = torch.empty(q_THK.shape)
        by_keys, by_values = torch.zeros(k_TJK.shape), torch.zeros(v_TJU.shape)
        call = _call_of(ctx.table, (q_THK, k_TJK, v_TJU, gradient), ctx.window, sinks_H)
        places = (x.data_ptr() for x in (out, stats, by_queries, by_keys, by_values))
        if not ctx.library.packed_attention_backward(*call, *places):
            raise _no_memory(ctx.table)
        by_sinks = None
        if sinks_H is not None:
            by_sinks = sinks_backward(gradient, (out, stats[..., 0] - stats[..., 1].log()), sinks_H)
        return None, by_queries, by_keys, by_values, None, None, by_sinks


def _attended(
    library: ctypes.CDLL,
    inputs: Sequence[Tensor],
    table: RowTable,
    stats: Tensor | None,
    window: Window,
    sinks_H: Sinks,
) -> Tensor:
    q_THK, _, v_TJU = inputs
    out_THU = q_THK.new_empty(*q_THK.shape[:2], v_TJU.shape[-1])
    place = None if stats is None else stats.data_ptr()
    if not library.packed_attention(*_call_of(table, inputs, window, sinks_H), out_THU.data_ptr(), place):
        raise _no_memory(table)
    return out_THU


def _no_memory(table: RowTable) -> MemoryError:
    return MemoryError(f"no memory for the scores of rows of at most {int(table.rows[:, 1::2].sum(1).max())} tokens")


def _sinks_of(sinks_H: Sinks) -> Tensor | None:
    return None if sinks_H is None else sinks_H.to(torch.float32).contiguous()


def _seen(window: Window, sinks_H: Sinks) -> tuple[int, int | None]:
    """Return the last fields of `_Shape`, for contiguous float32 sinks."""
    return _NO_WINDOW if window is None else window, None if sinks_H is None else sinks_H.data_ptr()


def _in_runs(heads: Tensor) -> Tensor:
    """Return the values with contiguous vectors."""
    return heads if heads.stride(-1) == 1 else heads.contiguous()


class _Heads(ctypes.Structure):
    """Memory layout of a tensor's vectors [T, heads, size]."""

    _fields_ = [("numbers", ctypes.c_void_p), ("token_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64)]


class _Shape(ctypes.Structure):
    """Sizes in the library's order."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "key_size", "value_size", "groups", "threads")),
        ("window", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
    ]


def _call_of(table: RowTable, inputs: Sequence[Tensor], window: Window, sinks_H: Sinks) -> tuple[Any, ...]:
    """Return the first arguments of both calls: queries, keys, values and perhaps a gradient, their sizes, and rows."""
    heads = (_Heads * len(inputs))(*(_Heads(x.data_ptr(), x.stride(0), x.stride(1)) for x in inputs))
    (_, num_heads, key_size), (_, num_kv_heads, value_size) = inputs[0].shape, inputs[2].shape
    threads = torch.get_num_threads()
    sizes = (num_heads, num_kv_heads, key_size, value_size, len(table.group_ends), threads)
    shape = _Shape(*sizes, *_seen(window, sinks_H))
    return heads, ctypes.byref(shape), table.rows.data_ptr(), table.group_ends.data_ptr()
