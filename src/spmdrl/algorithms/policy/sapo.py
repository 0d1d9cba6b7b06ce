"""SAPO: a soft gate in place of PPO's clip (arXiv:2511.20347, Eq. 5 and 6).

    A = (R - mean of the group) / standard deviation of the group
    L = -4 / tau sigmoid(tau (r - 1)) A, with tau_positive where A > 0 and tau_negative elsewhere

The slope of the gate is 1 where r is 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.algorithms.policy_gradient import GroupRelative
from spmdrl.algorithms.settings.policy_configs import SapoConfig
from spmdrl.algorithms.terms.losses import BOUNDED, bounded_exp, is_beyond_bound
from spmdrl.nouns.batch import TokenLoss, TokenTerms


@dataclass(frozen=True)
class Sapo(GroupRelative):
    """-f(r) A for each token, f(r) = 4 / tau * sigmoid(tau (r - 1)), whose slope is 1 where r is 1."""

    config: SapoConfig

    def policy_loss(self, terms: TokenTerms, old_logprobs_R: Tensor) -> TokenLoss:
        advantages_R = terms.columns["advantages"]
        tau_R = torch.full_like(advantages_R, self.config.tau_negative)
        tau_R.masked_fill_(advantages_R > 0, self.config.tau_positive)
        log_ratio_R = terms.logprobs_R - old_logprobs_R
        gate_R = 4 / tau_R * torch.sigmoid(tau_R * (bounded_exp(log_ratio_R) - 1))
        loss_R = -gate_R * advantages_R
        return TokenLoss(loss_R, {BOUNDED: is_beyond_bound(log_ratio_R).to(loss_R)})
