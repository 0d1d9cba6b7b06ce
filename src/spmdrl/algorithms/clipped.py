"""What algorithms with PPO's clipped loss share (Schulman et al. 2017, arXiv:1707.06347, Eq. 7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Interval
from torch import Tensor

from spmdrl.algorithms.algorithm import AlgoConfig, Algorithm
from spmdrl.algorithms.terms.losses import ClipRange, clipped_policy
from spmdrl.nouns import TokenLoss, TokenTerms


@dataclass(frozen=True)
class ClippedConfig(AlgoConfig):
    """Settings of PPO's clip."""

    clip_ratio_low: Annotated[float, Interval(ge=0, lt=1)] = 0.2
    """the probability ratio is clipped below at 1 - this"""
    clip_ratio_high: Annotated[float, Ge(0)] = 0.2
    """the probability ratio is clipped above at 1 + this; more than clip_ratio_low is DAPO's clip-higher"""
    clip_ratio_c: Annotated[float, Gt(1)] | None = None
    """dual clip: for negative advantages the loss is at most this times -advantage; null: off"""

    @property
    def clip(self) -> ClipRange:
        return ClipRange(self.clip_ratio_low, self.clip_ratio_high, self.clip_ratio_c)


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
