"""Probability ratios from differences of log-probs, bounded so that no float overflows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LOG_RATIO_BOUND = 20.0
"""in nats: a ratio lies between 2e-9 and 5e8, far from where a float32 (88.7 nats) ends"""


def bounded_exp(log_ratio_R: Tensor) -> Tensor:
    """The ratio of which this is the logarithm, held in [exp(-20), exp(20)].

    Beyond the bounds the gradient is that at the bound. A plain clamp has none there, and would never pull back the
    tokens that are furthest off.
    """
    held_R: Tensor = _Held.apply(log_ratio_R)  # type: ignore[no-untyped-call]
    return held_R.exp()


def is_beyond_bound(log_ratio_R: Tensor) -> Tensor:
    """Which tokens' ratios `bounded_exp` holds at a bound (bool)."""
    return log_ratio_R.detach().abs() > LOG_RATIO_BOUND


class _Held(torch.autograd.Function):
    """A clamp that lets gradients through."""

    @staticmethod
    def forward(ctx: Any, log_ratio_R: Tensor) -> Tensor:
        return log_ratio_R.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_R: Tensor) -> Tensor:
        return gradient_R
