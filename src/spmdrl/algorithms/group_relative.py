"""What algorithms share whose advantages compare the responses to one prompt (GRPO, arXiv:2402.03300)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spmdrl.algorithms.from_rewards import FromRewards
from spmdrl.algorithms.settings.algo_config import GroupRelativeConfig
from spmdrl.algorithms.terms.advantages import group_relative_advantages


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
