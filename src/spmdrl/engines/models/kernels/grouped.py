"""Linear layers of several experts by torch's grouped matrix product, where it takes the sizes.

Shape letters: `M` rows sorted by expert, `E` experts, `D` inputs and `O` outputs of a linear layer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# The product demands that rows of every operand begin at multiples of this.
_STRIDE_BYTES = 16


def grouped_mm_takes(rows_MD: Tensor, weights_EOD: Tensor) -> bool:
    """Whether there are rows, and all strides are as the grouped product demands them."""
    widths = weights_EOD.shape[1:]
    return len(rows_MD) > 0 and all(width * rows_MD.element_size() % _STRIDE_BYTES == 0 for width in widths)


def grouped_mm_linear(rows_MD: Tensor, weights_EOD: Tensor, counts_E: Tensor) -> Tensor:
    """Each expert's linear layer on its own rows; returns [M, O]."""
    ends_E = counts_E.to(rows_MD.device, non_blocking=True).cumsum(0).to(torch.int32)
    product_MO = F.grouped_mm(rows_MD.contiguous(), weights_EOD.transpose(1, 2), offs=ends_E)
    return _ContiguousGradient.apply(product_MO)


class _ContiguousGradient(torch.autograd.Function):
    """Hands on a gradient with plain strides: the product's backward fails on others, such as those of a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()
