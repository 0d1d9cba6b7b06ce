"""CISPO: REINFORCE with clipped importance weights, so that no token loses its gradient (arXiv:2506.13585, Eq. 4).

A = (R - mean of the group) / standard deviation of the group
L = -sg(clip(r, is_min, is_max)) A log p, where nothing flows through sg
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt
from torch import Tensor

from spmdrl.algorithms.group_relative import GroupRelative, GroupRelativeConfig
from spmdrl.algorithms.terms.losses import BOUNDED, bounded_exp, is_beyond_bound
from spmdrl.nouns import TokenLoss, TokenTerms


@dataclass(frozen=True)
class CispoConfig(GroupRelativeConfig):
    """Clipped importance weights (MiniMax-M1, arXiv:2506.13585)."""

    name: Literal["cispo"] = "cispo"
    """the algorithm"""
    is_min: Annotated[float, Ge(0)] = 0.0
    """lower bound of a token's importance weight, a ratio and not a distance from 1; 0: none (the paper)"""
    is_max: Annotated[float, Gt(0)] = 5.0
    """upper bound of a token's importance weight, a ratio and not a distance from 1; TRL's epsilon_high is the same"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_min >= self.is_max:
            raise ValueError(
                f"algo.is_min is {self.is_min} and algo.is_max {self.is_max}, but weights lie between them; both are "
                "ratios: set algo.is_min below algo.is_max, or to 0 for no lower bound"
            )


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
