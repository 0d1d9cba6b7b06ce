"""CISPO: REINFORCE with clipped importance weights, so that no token loses its gradient (arXiv:2506.13585, Eq. 4).

A = (R - mean of the group) / standard deviation of the group
L = -sg(clip(r, is_min, is_max)) A log p, where sg stops the gradient
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spmdrl.algorithms.policy_gradient import GroupRelative
from spmdrl.algorithms.settings.policy_configs import CispoConfig
from spmdrl.algorithms.terms.losses import BOUNDED, bounded_exp, is_beyond_bound
from spmdrl.nouns.batch import TokenLoss, TokenTerms


@dataclass(frozen=True)
class Cispo(GroupRelative):
    """-sg(clip(r, is_min, is_max)) A log p for each token, with GRPO's advantages."""

    config: CispoConfig

    def policy_loss(self, terms: TokenTerms, old_logprobs_R: Tensor) -> TokenLoss:
        log_ratio_R = terms.logprobs_R.detach() - old_logprobs_R
        ratio_R = bounded_exp(log_ratio_R)
        weight_R = ratio_R.clamp(self.config.is_min, self.config.is_max)
        loss_R = -weight_R * terms.columns["advantages"] * terms.logprobs_R
        metrics = {
            "clip_ratio/low_mean": ratio_R < self.config.is_min,
            "clip_ratio/high_mean": ratio_R > self.config.is_max,
            BOUNDED: is_beyond_bound(log_ratio_R),
        }
        return TokenLoss(loss_R, {name: tokens_R.to(loss_R) for name, tokens_R in metrics.items()})
