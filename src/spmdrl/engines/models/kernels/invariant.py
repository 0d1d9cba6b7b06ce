"""Operations on a CPU whose result for a row has the same bits whatever else is computed beside it.

So a token's log-prob is the same when a batch of other rows decodes beside it, when its row is scored in one piece, and
in the update. Requirements, in float32 on one thread:

- a matrix product rounds each row equally from LEAST_ROWS rows on, but differently with fewer: fewer are padded; its
columns are rounded equally whatever other columns there are, from 11 on: with fewer, as of an adapter's A, rounding
depends on a row's address, so that they are padded to LEAST_COLUMNS;

This holds for forward passes only: gradients have ordinary rounding errors.

Shape letters: `M` rows sorted by expert, `E` experts, `D` inputs and `O` outputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.models.kernels import plain
from spmdrl.engines.models.kernels.cpp import row_attention

LEAST_COLUMNS = 16
# Two of the widest vectors, the unit of a loop over elements in any dtype.
_ELEMENTS_AT_A_TIME = 64


def linear(rows_MD: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    lacking = LEAST_COLUMNS - len(weight_OD)
    if lacking <= 0:
        return plain.linear(rows_MD, weight_OD, bias_O)
    out = plain.linear(rows_MD, F.pad(weight_OD, (0, 0, 0, lacking)))[..., :-lacking]
    return out if bias_O is None else out + bias_O


def sigmoid(x: Tensor) -> Tensor:
    return _in_whole_vectors(torch.sigmoid, x)


def softplus(x: Tensor) -> Tensor:
    return _in_whole_vectors(F.softplus, x)


def softcap(logits: Tensor, cap: float) -> Tensor:
    return _in_whole_vectors(torch.tanh, logits.div_(cap)).mul_(cap)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return _in_whole_vectors(F.silu, gate) * up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    return _in_whole_vectors(partial(F.gelu, approximate="tanh"), gate) * up


def _in_whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply an elementwise function to x, padded to whole vectors."""
    if x.shape[-1] % _ELEMENTS_AT_A_TIME == 0:
        return function(x)
    lacking = -x.numel() % _ELEMENTS_AT_A_TIME
    return function(F.pad(x.flatten(), (0, lacking)))[: x.numel()].view_as(x)


def grouped_linear(rows_MD: Tensor, weights_EOD: Tensor, counts_E: Tensor) -> Tensor:
    groups = zip(rows_MD.split(counts_E.tolist()), weights_EOD.unbind(), strict=True)
    return torch.cat([linear(rows, weight) for rows, weight in groups])


OPERATIONS: dict[str, Callable[..., Any]] = {
    "swiglu": swiglu,
    "geglu": geglu,
    "sigmoid": sigmoid,
    "softplus": softplus,
    "softcap": softcap,
    "grouped_linear": grouped_linear,
    "linear": linear,
    # Its bits differ from F.linear's.
    "blocked_linear": plain.blocked_linear,
    # The generator sums in this order.
    "exponential_sums": plain.exponential_sums,
    "paged_attention": row_attention.cached_attention,
}
