"""DPPO: a trust region by divergence instead of by ratio (arXiv:2602.04879).

    A = R - mean of the group
    r = p / q, with the generator's probability q
    L = -M sg(min(r, is_max)) A log p

M is 0 where an update has moved a token in A's direction by more than a bound on |p - q| (tv) or on the divergence of
two coins, which show this token or another (kl); else 1. sg stops the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from spmdrl.algorithms.policy_gradient import GroupRelative
from spmdrl.algorithms.settings.policy_configs import DppoConfig
from spmdrl.algorithms.terms.losses import BOUNDED, bounded_exp, is_beyond_bound
from spmdrl.nouns.batch import TokenLoss, TokenTerms


@dataclass(frozen=True)
class Dppo(GroupRelative):
    """-sg(min(r, is_max)) A log p for each token, or 0 where an update has moved it too far in A's direction."""

    config: DppoConfig

    def columns_for_loss(self, num_updates: int) -> frozenset[str]:
        columns = super().columns_for_loss(num_updates)
        return columns | {"rollout_logprobs"} if self.config.anchor == "rollout" else columns

    def policy_loss(self, terms: TokenTerms, old_logprobs_R: Tensor) -> TokenLoss:
        config, advantages_R = self.config, terms.columns["advantages"]
        anchor_R = terms.columns["rollout_logprobs"] if config.anchor == "rollout" else old_logprobs_R
        log_ratio_R = terms.logprobs_R - anchor_R
        divergence_R = binary_divergence(terms.logprobs_R.detach(), anchor_R, config.divergence)
        (low, high), moved_R = config.bounds, log_ratio_R.detach()
        low_R = (advantages_R < 0) & (moved_R < 0) & (divergence_R > low)
        high_R = (advantages_R > 0) & (moved_R > 0) & (divergence_R > high)
        weight_R = bounded_exp(moved_R).clamp(max=config.is_max).masked_fill(low_R | high_R, 0.0)
        loss_R = -weight_R * advantages_R * terms.logprobs_R
        metrics = {"clip_ratio/low_mean": low_R, "clip_ratio/high_mean": high_R, BOUNDED: is_beyond_bound(moved_R)}
        return TokenLoss(loss_R, {name: tokens_R.to(loss_R) for name, tokens_R in metrics.items()})


def binary_divergence(logprobs_R: Tensor, anchor_R: Tensor, kind: Literal["tv", "kl"]) -> Tensor:
    """Compare two policies, each reduced to a coin: this token, with the given log-prob, or another (section 4.2)."""
    p_R, q_R = logprobs_R.exp(), anchor_R.exp()
    if kind == "tv":
        return (p_R - q_R).abs()
    # KL(anchor || policy); the log-prob of "another" ends where a token is certain.
    smallest = torch.finfo(p_R.dtype).tiny
    other_p_R, other_q_R = (-logprobs_R.expm1()).clamp(min=smallest), (-anchor_R.expm1()).clamp(min=smallest)
    return q_R * (anchor_R - logprobs_R) + other_q_R * (other_q_R.log() - other_p_R.log())
