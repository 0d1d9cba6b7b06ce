"""Operations on a CPU whose result for a row has the same bits whatever else is computed beside it.

So a token's log-prob is the same when a batch of other rows decodes beside it, when its row is scored in one piece,
and in the update. What that takes, in float32 on one thread:

- a matrix product rounds each row alike from LEAST_ROWS rows on, but differently with fewer: fewer are padded; its
  columns are rounded alike whatever other columns there are, from 11 on: with fewer, as of an adapter's A, a row rounds
  by where it lies in memory, so that they are filled up to LEAST_COLUMNS;
- silu and sigmoid round the last elements of a tensor, those that fill no vector, differently from the rest: tensors
  are filled up;
- how attention's sum over the keys is split depends on their number. The CPU's library goes through them one by one,
  in whole rows and in the cache.

This holds for forward passes only: gradients are right to rounding, as they are elsewhere.

Shape letters: `M` rows sorted by expert, `E` experts, `D` inputs and `O` outputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.models.kernels import plain
from spmdrl.engines.models.kernels.cpp import row_attention

LEAST_COLUMNS = 16
# Two of the widest vectors, which is what a loop over elements takes at a time, in any dtype.
_ELEMENTS_AT_A_TIME = 64


def linear(rows_MD: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    lacking = LEAST_COLUMNS - len(weight_OD)
    if lacking <= 0:
        return plain.linear(rows_MD, weight_OD, bias_O)
    out = plain.linear(rows_MD, F.pad(weight_OD, (0, 0, 0, lacking)))[..., :-lacking]
    return out if bias_O is None else out + bias_O


def sigmoid(x: Tensor) -> Tensor:
    return _in_whole_vectors(torch.sigmoid, x)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return _in_whole_vectors(F.silu, gate) * up


def _in_whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return an elementwise function of x, none of whose elements is left over when vectors are filled."""
    if x.shape[-1] % _ELEMENTS_AT_A_TIME == 0:
        return function(x)
    lacking = -x.numel() % _ELEMENTS_AT_A_TIME
    return function(F.pad(x.flatten(), (0, lacking)))[: x.numel()].view_as(x)


def grouped_linear(rows_MD: Tensor, weights_EOD: Tensor, counts_E: Tensor) -> Tensor:
    groups = zip(rows_MD.split(counts_E.tolist()), weights_EOD.unbind(), strict=True)
    return torch.cat([linear(rows, weight) for rows, weight in groups])


OPERATIONS: dict[str, Callable[..., Any]] = {
    "swiglu": swiglu,
    "sigmoid": sigmoid,
    "grouped_linear": grouped_linear,
    "linear": linear,
    # Its bits are others than those of F.linear.
    "blocked_linear": plain.blocked_linear,
    # The generator sums them so.
    "exponential_sums": plain.exponential_sums,
    "paged_attention": row_attention.cached_attention,
}
