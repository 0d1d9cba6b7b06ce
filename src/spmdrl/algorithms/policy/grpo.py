"""GRPO: group-relative advantages and the clipped loss (DeepSeekMath, arXiv:2402.03300, Eq. 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from spmdrl.algorithms.clipped import Clipped, ClippedConfig
from spmdrl.algorithms.terms.advantages import group_relative_advantages
from spmdrl.algorithms.terms.losses import sequence_mean
from spmdrl.types import TokenTerms


@dataclass(frozen=True)
class GroupRelativeConfig(ClippedConfig):
    """Settings of GRPO and of what was made of it."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """rewards minus their group's mean are divided by the standard deviation of the group or of the batch; none: not
    divided"""
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
        return group_relative_advantages(rewards_B, groups_B, self.config.scale_rewards)

    def log_ratio(self, terms: TokenTerms, old_logprobs_R: Tensor) -> Tensor:
        log_ratio_R = super().log_ratio(terms, old_logprobs_R)
        if self.config.ratio_level == "token":
            return log_ratio_R
        return sequence_mean(log_ratio_R, terms.row_of_token_R, terms.num_rows)
