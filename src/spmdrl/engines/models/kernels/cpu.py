"""Operations on a CPU.

Shape letters: `M` rows, `D` inputs and `O` outputs of a linear layer, `E` experts, `T` packed tokens, `H` query heads,
`J` key and value heads, `K` head size of queries and keys, `U` head size of values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.models.kernels import plain
from spmdrl.engines.models.kernels.grouped import grouped_mm_linear, grouped_mm_takes
from spmdrl.engines.models.kernels.packed import PackedRows, padded_attention

# The layout that oneDNN chooses for this many rows is the one for any greater number too.
_EXPECTED_ROWS = 16
_BLOCKED_DTYPES = (torch.float32, torch.bfloat16)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # The same bits in fewer operations, where nothing is rounded in between.
    if x.dtype == weight.dtype == torch.float32:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return plain.rms_norm(x, weight, eps)


def grouped_linear(rows_MD: Tensor, weights_EOD: Tensor, counts_E: Tensor) -> Tensor:
    # Forward and backward take 10 to 40% less time than a loop of linear layers, most with many experts.
    if grouped_mm_takes(rows_MD, weights_EOD):
        return grouped_mm_linear(rows_MD, weights_EOD, counts_E)
    return plain.grouped_linear(rows_MD, weights_EOD, counts_E)


def blocked_linear(weight_OD: Tensor, bias_O: Tensor | None) -> BlockedLinear | None:
    return BlockedLinear(weight_OD, bias_O) if blocked_linear_takes(weight_OD) else None


def add_matmul(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return out.addmm_(a.to(out.dtype).T, b.to(out.dtype))


def packed_attention(q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor, rows: PackedRows) -> Tensor:
    return padded_attention(q_THK, k_TJK, v_TJU, rows.padded(q_THK.device))


class BlockedLinear:
    """A linear layer whose weight lies in blocks, as oneDNN's products read it, for inference.

    With few rows a product is bound by reading the weight, and one in blocks streams through the caches in order. A row
    gets the same bits whatever is beside it, from 4 rows on, but not those of F.linear. The weight is copied, the bias
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


def blocked_linear_takes(weight_OD: Tensor) -> bool:
    """Whether this build of PyTorch, and the CPU, have such products of the weight's dtype."""
    if not (torch.backends.mkldnn.is_available() and weight_OD.dtype in _BLOCKED_DTYPES):
        return False
    return weight_OD.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
