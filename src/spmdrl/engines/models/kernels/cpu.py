"""Operations on a CPU.

Shape letters: `M` rows, `D` inputs and `O` outputs of a linear layer, `E` experts, `T` packed tokens, `H` query heads,
`J` key and value heads, `K` head size of queries and keys, `U` head size of values, `B` rows, `C` blocks of a table.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from spmdrl.engines.models.kernels import plain
from spmdrl.engines.models.kernels.cpp.cpu_library import cpu_library


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
