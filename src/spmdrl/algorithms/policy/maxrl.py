"""MaxRL: rewards relative to their group's mean, which gives hard prompts more weight (arXiv:2602.02710).

A = (R - mean of the group) / mean of the group, 0 where the mean isn't above 0
L = -min(r A, clip(r, 1 - low, 1 + high) A)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.algorithms.policy_gradient import Clipped, FromRewards
from spmdrl.algorithms.settings.policy_configs import MaxRlConfig
from spmdrl.algorithms.terms.advantages import Groups


@dataclass(frozen=True)
class MaxRl(FromRewards, Clipped):
    """A = (R - mean) / mean, and 0 where the mean isn't above 0; wrong answers have reward 0."""

    config: MaxRlConfig

    @property
    def min_responses(self) -> int:
        return 2

    def row_advantages(self, rewards_B: Tensor, groups_B: Tensor) -> Tensor:
        means_B = Groups(groups_B).means(rewards_B)
        return torch.where(means_B > 0, (rewards_B - means_B) / means_B, 0.0).to(rewards_B)
