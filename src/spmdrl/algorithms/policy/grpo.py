"""GRPO: group-relative advantages and the clipped loss (DeepSeekMath, arXiv:2402.03300, Eq. 3).

    A = (R - mean of the group) / standard deviation of the group
    r = p / p_old, for each token
    L = -min(r A, clip(r, 1 - low, 1 + high) A) + kl_coef KL

A group is the responses to one prompt. For negative A, L is at most clip_ratio_c |A| where that is set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge
from torch import Tensor

from spmdrl.algorithms.clipped import Clipped, ClippedConfig
from spmdrl.algorithms.group_relative import GroupRelative, GroupRelativeConfig
from spmdrl.algorithms.terms.losses import LossAggregation, sequence_mean
from spmdrl.nouns import TokenTerms


@dataclass(frozen=True)
class GrpoSettings(GroupRelativeConfig, ClippedConfig):
    """Settings of GRPO and of what differs from it by them alone."""

    ratio_level: Literal["token", "sequence"] = "token"
    """token: one probability ratio per token; sequence: their geometric mean over a row (GSPO)"""


@dataclass(frozen=True)
class GrpoConfig(GrpoSettings):
    """Group-relative advantages and PPO's clipped loss (arXiv:2402.03300), in the form of TRL's and verl's defaults."""

    name: Literal["grpo"] = "grpo"
    """the algorithm"""


@dataclass(frozen=True)
class GrpoPaperConfig(GrpoSettings):
    """GRPO with the values of its paper (arXiv:2402.03300, section 4.2)."""

    name: Literal["grpo_paper"] = "grpo_paper"
    """the algorithm"""
    kl_coef: Annotated[float, Ge(0)] = 0.04
    """weight of the KL divergence from the reference model; 0: no reference model is loaded"""
    loss_agg: LossAggregation = "seq-mean-token-mean"
    """how token losses become one number; the paper's is seq-mean-token-mean, the mean over rows of a row's mean"""


@dataclass(frozen=True)
class Grpo(GroupRelative, Clipped):
    """With clip_ratio_high above clip_ratio_low it has DAPO's clip-higher; with ratio_level sequence it is GSPO."""

    config: GrpoSettings

    def log_ratio(self, terms: TokenTerms, old_logprobs_R: Tensor) -> Tensor:
        log_ratio_R = super().log_ratio(terms, old_logprobs_R)
        if self.config.ratio_level == "token":
            return log_ratio_R
        return sequence_mean(log_ratio_R, terms.row_of_token_R, terms.num_rows)
