"""Policy losses per token from bounded probability ratios, and the weights that sum them into one exact global loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spmdrl.algorithms.settings.algo_config import ClipRange, LossAggregation
from spmdrl.nouns.batch import LossScope, TokenLoss

BOUNDED = "clip_ratio/bounded_share"
"""Metric: share of tokens whose log-ratio lies beyond the bound."""
LOG_RATIO_BOUND = 20.0
"""in nats: ratios lie between 2e-9 and 5e8, far from the end of float32 (88.7 nats)"""


def bounded_exp(log_ratio_R: Tensor) -> Tensor:
    """Return the exponential, held in [exp(-20), exp(20)].

    Beyond a bound the gradient is the bound's. A plain clamp has none there, and would never pull back the tokens that
    are furthest off.
    """
    held_R: Tensor = _Held.apply(log_ratio_R)
    return held_R.exp()


def is_beyond_bound(log_ratio_R: Tensor) -> Tensor:
    """Mark tokens whose ratio `bounded_exp` holds at a bound (bool)."""
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


def clipped_policy(log_ratio_R: Tensor, advantages_R: Tensor, clip: ClipRange) -> TokenLoss:
    """Return the clipped policy loss, with metrics of the tokens held back by the clip or the ratio's bound."""
    low_R, high_R = clipped_tokens(log_ratio_R, advantages_R, clip)
    held_R = log_ratio_R.detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    metrics = {
        "clip_ratio/low_mean": low_R,
        "clip_ratio/high_mean": high_R,
        BOUNDED: is_beyond_bound(log_ratio_R).float(),
        # Estimates KL(before || now) by k3; 0 in a step's first update.
        "policy_kl": held_R.exp() - 1 - held_R,
    }
    return TokenLoss(clipped_policy_loss(log_ratio_R, advantages_R, clip), metrics)


def clipped_policy_loss(log_ratio_R: Tensor, advantages_R: Tensor, clip: ClipRange) -> Tensor:
    """Return PPO's negated clipped objective (Schulman et al. 2017, Eq. 7), with dual clip (Ye et al. 2020, Eq. 5)."""
    ratio_R = bounded_exp(log_ratio_R)
    clipped_R = ratio_R.clamp(1 - clip.low, 1 + clip.high)
    loss_R = torch.maximum(-ratio_R * advantages_R, -clipped_R * advantages_R)
    if clip.dual is not None:
        loss_R = torch.where(advantages_R < 0, torch.minimum(loss_R, -clip.dual * advantages_R), loss_R)
    return loss_R


def clipped_tokens(log_ratio_R: Tensor, advantages_R: Tensor, clip: ClipRange) -> tuple[Tensor, Tensor]:
    """Mark the tokens that the low and the high bound hold back (1.0 or 0.0 each)."""
    ratio_R = bounded_exp(log_ratio_R.detach())
    low_R = (ratio_R < 1 - clip.low) & (advantages_R < 0)
    high_R = (ratio_R > 1 + clip.high) & (advantages_R > 0)
    return low_R.to(ratio_R), high_R.to(ratio_R)


def sequence_mean(values_R: Tensor, row_of_token_R: Tensor, num_rows: int) -> Tensor:
    """Return at each token its row's mean [R], with gradient; of log-ratios, GSPO's (arXiv:2507.18071, Eq. 7)."""
    sums_B, lengths_B = sums_and_lengths(values_R, row_of_token_R, num_rows)
    return (sums_B / lengths_B.clamp(min=1))[row_of_token_R]


def weighted(loss_R: Tensor, weights_R: Tensor) -> Tensor:
    """Return the product, and 0 where the weight is 0, even if the loss isn't finite."""
    return torch.where(weights_R == 0, 0.0, weights_R * loss_R)


def sums_and_lengths(values_R: Tensor, row_of_token_R: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return the sum over each row's tokens [B], with its gradient, and their number [B]."""
    sums_B = values_R.new_zeros(num_rows).index_add(0, row_of_token_R, values_R)
    lengths_B = values_R.new_zeros(num_rows).index_add(0, row_of_token_R, torch.ones_like(values_R))
    return sums_B, lengths_B


def token_weights(lengths_B: Tensor, aggregation: LossAggregation, scope: LossScope) -> Tensor:
    """Return the weight of each response token [R] (float64), so that the weighted sum over all ranks is the loss."""
    lengths = lengths_B.double()
    if aggregation == "token-mean":
        weight_B = torch.full_like(lengths, 1.0 / max(scope.num_tokens, 1))
    elif aggregation == "seq-mean-token-mean":
        weight_B = 1.0 / (lengths.clamp(min=1) * max(scope.num_rows, 1))
    elif aggregation == "seq-mean-token-sum":
        weight_B = torch.full_like(lengths, 1.0 / max(scope.num_rows, 1))
    else:
        weight_B = torch.full_like(lengths, 1.0 / (max(scope.num_rows, 1) * scope.max_length))
    return weight_B.repeat_interleave(lengths_B)
