"""What algorithms share whose advantages compare the responses to one prompt (GRPO, arXiv:2402.03300)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge
from torch import Tensor

from spmdrl.algorithms.algorithm import AlgoConfig
from spmdrl.algorithms.from_rewards import FromRewards
from spmdrl.algorithms.terms.advantages import EPSILON, Deviation, group_relative_advantages


@dataclass(frozen=True)
class GroupRelativeConfig(AlgoConfig):
    """How rewards are compared with those of the same prompt."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """rewards minus their group's mean are divided by the standard deviation of the group or of the batch; none: not
    divided"""
    std: Deviation = "unbiased"
    """the standard deviation of n rewards divides by n - 1 (unbiased) or n (biased); papers leave it open"""
    std_epsilon: Annotated[float, Ge(0)] = EPSILON
    """added to the standard deviation; 1e-4 as in TRL, verl has 1e-6, OpenRLHF 1e-9"""


@dataclass(frozen=True)
class GroupRelative(FromRewards):
    """A = (R - mean of the group) / standard deviation."""

    config: GroupRelativeConfig

    @property
    def min_responses(self) -> int:
        return 2

    def row_advantages(self, rewards_B: Tensor, groups_B: Tensor) -> Tensor:
        config = self.config
        return group_relative_advantages(rewards_B, groups_B, config.scale_rewards, config.std, config.std_epsilon)
