"""Sums over the vocabulary and their gradients by the CPU's library in float32: one reading of the logits each.

Without the library and in other dtypes PyTorch's operations run, which round differently in the
last bits.

Shape letters: `C` places, `V` vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmdrl.engines.models.kernels import plain
from spmdrl.engines.models.kernels.cpp.cpu_library import library_for


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
