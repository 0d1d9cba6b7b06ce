"""GRPO: group-relative advantages and the clipped loss (DeepSeekMath, arXiv:2402.03300, Eq. 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt
from torch import Tensor

from spmdrl.algorithms.algorithm import AlgoConfig, Algorithm
from spmdrl.algorithms.terms.advantages import group_relative_advantages
from spmdrl.algorithms.terms.losses import ClipRange, clipped_policy, sequence_log_ratio
from spmdrl.types import TokenLoss, TokenTerms


@dataclass(frozen=True)
class GrpoConfig(AlgoConfig):
    """Group-relative advantages and PPO's clipped loss (arXiv:2402.03300)."""

    name: Literal["grpo"] = "grpo"
    """the algorithm"""
    clip_ratio_c: Annotated[float, Gt(1)] | None = None
    """dual clip: for negative advantages the loss is at most this times -advantage; null: off"""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """rewards minus their group's mean are divided by the standard deviation of the group or of the batch; none: not
    divided"""
    ratio_level: Literal["token", "sequence"] = "token"
    """token: one probability ratio per token; sequence: their geometric mean over a row (GSPO)"""


@dataclass(frozen=True)
class Grpo(Algorithm):
    """With clip_ratio_high above clip_ratio_low it has DAPO's clip-higher; with ratio_level sequence it is GSPO."""

    config: GrpoConfig

    @property
    def min_responses(self) -> int:
        return 2

    def row_advantages(self, rewards_B: Tensor, groups_B: Tensor) -> Tensor:
        return group_relative_advantages(rewards_B, groups_B, self.config.scale_rewards)

    def policy_loss(self, terms: TokenTerms, old_logprobs_R: Tensor) -> TokenLoss:
        config = self.config
        log_ratio_R = terms.logprobs_R - old_logprobs_R
        if config.ratio_level == "sequence":
            log_ratio_R = sequence_log_ratio(log_ratio_R, terms.row_of_token_R, terms.num_rows)
        clip = ClipRange(config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_c)
        return clipped_policy(log_ratio_R, terms.columns["advantages"], clip)
