"""What algorithms with PPO's clipped loss share (Schulman et al. 2017, arXiv:1707.06347, Eq. 7)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spmdrl.algorithms.algorithm import Algorithm
from spmdrl.algorithms.settings.algo_config import ClippedConfig
from spmdrl.algorithms.terms.losses import clipped_policy
from spmdrl.nouns.batch import TokenLoss, TokenTerms


@dataclass(frozen=True)
class Clipped(Algorithm):
    """PPO's clipped loss with a probability ratio per token."""

    config: ClippedConfig

    def policy_loss(self, terms: TokenTerms, old_logprobs_R: Tensor) -> TokenLoss:
        log_ratio_R = self.log_ratio(terms, old_logprobs_R)
        return clipped_policy(log_ratio_R, terms.columns["advantages"], self.config.clip)

    def log_ratio(self, terms: TokenTerms, old_logprobs_R: Tensor) -> Tensor:
        """The logarithm of each token's probability ratio [R]."""
        return terms.logprobs_R - old_logprobs_R
