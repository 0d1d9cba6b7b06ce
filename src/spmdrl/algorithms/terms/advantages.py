"""Advantages from rewards relative to groups, as in GRPO (DeepSeekMath, arXiv:2402.03300), and sums over rows."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

# Keeps a group of nearly equal rewards from being blown up; far below any reward difference that matters.
EPSILON = 1e-4


def group_relative_advantages(rewards_B: Tensor, groups_B: Tensor, scale: Literal["group", "batch", "none"]) -> Tensor:
    """Reward minus its group's mean, over the standard deviation that `scale` names.

    Standard deviations are unbiased; a group of one row has advantage 0.
    """
    rewards = rewards_B.double()
    group_B, count = group_sizes(groups_B)

    def total(values_B: Tensor) -> Tensor:
        return torch.zeros_like(count).index_add_(0, group_B, values_B)

    centred_B = rewards - (total(rewards) / count)[group_B]
    if scale == "group":
        deviation = (total(centred_B.square()) / (count - 1).clamp(min=1)).sqrt()
        centred_B = centred_B / (deviation[group_B] + EPSILON)
    elif scale == "batch":
        deviation = rewards.std() if rewards.numel() > 1 else rewards.new_zeros(())
        centred_B = centred_B / (deviation + EPSILON)
    return centred_B.float()


def group_sizes(groups_B: Tensor) -> tuple[Tensor, Tensor]:
    """The place of each row's group among all groups [B], and the rows in each group [number of groups] as float64."""
    _, group_B, counts = groups_B.unique(return_inverse=True, return_counts=True)
    return group_B, counts.double()


def row_sums(values_R: Tensor, lengths_B: Tensor) -> Tensor:
    """The sum over each row's tokens [B]."""
    row_R = torch.arange(len(lengths_B)).repeat_interleave(lengths_B)
    return values_R.new_zeros(len(lengths_B)).index_add_(0, row_R, values_R)


def sums_to_row_end(values_R: Tensor, lengths_B: Tensor) -> Tensor:
    """At each token the sum over it and all later tokens of its row [R]."""
    rows = values_R.split(lengths_B.tolist())
    return torch.cat([row.flip(0).cumsum(0).flip(0) for row in rows]) if rows else values_R
