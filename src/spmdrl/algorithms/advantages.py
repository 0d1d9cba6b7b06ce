"""Advantages from rewards, group-relative as in GRPO (DeepSeekMath, arXiv:2402.03300, section 4.1.2)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

# Keeps a group of nearly equal rewards from being blown up; far below any reward difference that matters.
EPSILON = 1e-4


def group_relative_advantages(rewards_B: Tensor, groups_B: Tensor, scale: Literal["group", "batch", "none"]) -> Tensor:
    """Reward minus its group's mean, over the standard deviation that `scale` names.

    NaN rewards are left out of every statistic and stay NaN. Standard deviations are unbiased; a group
    of one usable row has advantage 0.
    """
    usable_B = ~rewards_B.isnan()
    members, group_B = groups_B.unique(return_inverse=True)
    rewards = rewards_B.double().nan_to_num(0.0)

    def total(values_B: Tensor) -> Tensor:
        return torch.zeros(len(members), dtype=torch.float64).index_add_(0, group_B, values_B)

    count = total(usable_B.double())
    mean = total(rewards) / count.clamp(min=1)
    centred_B = (rewards - mean[group_B]) * usable_B
    if scale == "group":
        deviation = (total(centred_B.square()) / (count - 1).clamp(min=1)).sqrt()
        centred_B = centred_B / (deviation[group_B] + EPSILON)
    elif scale == "batch":
        centred_B = centred_B / (usable_deviation(rewards_B) + EPSILON)
    return centred_B.float().masked_fill(~usable_B, float("nan"))


def usable_deviation(rewards_B: Tensor) -> Tensor:
    """The unbiased standard deviation of the rewards that are not NaN; 0 where fewer than two are."""
    usable = rewards_B[~rewards_B.isnan()].double()
    return usable.std() if usable.numel() > 1 else torch.zeros((), dtype=torch.float64)
