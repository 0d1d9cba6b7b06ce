"""Linear layers by oneDNN's products on a CPU.

Shape letters: `M` rows, `D` inputs and `O` outputs of a linear layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The layout that oneDNN chooses for this many rows is the one for any greater number too.
_EXPECTED_ROWS = 16
_BLOCKED_DTYPES = (torch.float32, torch.bfloat16)


class BlockedLinear:
    """A linear layer whose weight lies in blocks, as oneDNN's products read it, for inference.

    With few rows a product is bound by reading the weight, and one in blocks streams through the caches in order. A row
    gets the same bits whatever is beside it, from 2 rows on, but not those of F.linear. The weight is copied, the bias
    used where it lies.
    """

    def __init__(self, weight_OD: Tensor, bias_O: Tensor | None):
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_OD.detach(), _EXPECTED_ROWS)
        self._bias_O = bias_O

    def __call__(self, rows_MD: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(rows_MD, self._weight, self._bias_O, "none", [], "")

    @property
    def num_bytes(self) -> int:
        return self._weight.numel() * self._weight.dtype.itemsize

    def weight(self) -> Tensor:
        """The weight [O, D] in the usual layout."""
        return self._weight.to_dense()


def blocked_linear(weight_OD: Tensor, bias_O: Tensor | None) -> BlockedLinear | None:
    return BlockedLinear(weight_OD, bias_O) if blocked_linear_takes(weight_OD) else None


def blocked_linear_takes(weight_OD: Tensor) -> bool:
    """Whether this build of PyTorch, and the CPU, have such products of the weight's dtype."""
    if not (torch.backends.mkldnn.is_available() and weight_OD.dtype in _BLOCKED_DTYPES):
        return False
    return weight_OD.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
