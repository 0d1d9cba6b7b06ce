"""GRPO: group-relative advantages and the clipped loss (DeepSeekMath, arXiv:2402.03300, Eq. 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge
from torch import Tensor

from spmdrl.algorithms.clipped import Clipped, ClippedConfig
from spmdrl.algorithms.terms.advantages import EPSILON, Deviation, group_relative_advantages
from spmdrl.algorithms.terms.losses import sequence_mean
from spmdrl.types import TokenTerms


@dataclass(frozen=True)
class GroupRelativeConfig(ClippedConfig):
    """Settings of GRPO and of what was made of it."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """rewards minus their group's mean are divided by the standard deviation of the group or of the batch; none: not
    divided"""
    std: Deviation = "unbiased"
    """the standard deviation of n rewards divides by n - 1 (unbiased) or n (biased); papers leave it open"""
    std_epsilon: Annotated[float, Ge(0)] = EPSILON
    """added to the standard deviation; 1e-4 as in TRL, verl has 1e-6, OpenRLHF 1e-9"""
    ratio_level: Literal["token", "sequence"] = "token"
    """token: one probability ratio per token; sequence: their geometric mean over a row (GSPO)"""


@dataclass(frozen=True)
class GrpoConfig(GroupRelativeConfig):
    """Group-relative advantages and PPO's clipped loss (arXiv:2402.03300)."""

    name: Literal["grpo"] = "grpo"
    """the algorithm"""


@dataclass(frozen=True)
class Grpo(Clipped):
    """With clip_ratio_high above clip_ratio_low it has DAPO's clip-higher; with ratio_level sequence it is GSPO."""

    config: GroupRelativeConfig

    @property
    def min_responses(self) -> int:
        return 2

    def row_advantages(self, rewards_B: Tensor, groups_B: Tensor) -> Tensor:
        config = self.config
        return group_relative_advantages(rewards_B, groups_B, config.scale_rewards, config.std, config.std_epsilon)

    def log_ratio(self, terms: TokenTerms, old_logprobs_R: Tensor) -> Tensor:
        log_ratio_R = super().log_ratio(terms, old_logprobs_R)
        if self.config.ratio_level == "token":
            return log_ratio_R
        return sequence_mean(log_ratio_R, terms.row_of_token_R, terms.num_rows)
