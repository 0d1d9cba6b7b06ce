"""Advantages from rewards relative to groups, as in GRPO (DeepSeekMath, arXiv:2402.03300), and sums over rows.

Sums are float64, and results have the dtype of their inputs. Shape letters: `B` rows, `R` response tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from spmdrl.algorithms.settings.algo_config import EPSILON, Deviation

# For values over a whole batch, which are nearly equal only where they are equal.
_WHITENING_EPSILON = 1e-8


class Groups:
    """Rows in groups, by the number of the prompt that each answers."""

    def __init__(self, groups_B: Tensor):
        _, self._group_B, counts = groups_B.unique(return_inverse=True, return_counts=True)
        self._counts = counts.double()

    @property
    def sizes_B(self) -> Tensor:
        """The number of rows in each row's group."""
        return self._counts[self._group_B]

    def sums(self, values_B: Tensor) -> Tensor:
        """Return the sum over each row's group [B]."""
        return torch.zeros_like(self._counts).index_add_(0, self._group_B, values_B.double())[self._group_B]

    def means(self, values_B: Tensor) -> Tensor:
        """Return the mean over each row's group [B]."""
        return self.sums(values_B) / self.sizes_B

    def least(self, values_B: Tensor) -> Tensor:
        """Return the least value in each row's group [B]."""
        least = torch.full_like(self._counts, float("inf"))
        return least.scatter_reduce_(0, self._group_B, values_B.double(), "amin")[self._group_B]

    def deviations(self, values_B: Tensor, kind: Deviation = "unbiased") -> Tensor:
        """Return the standard deviation of each row's group [B]; 0 in a group of one row."""
        squares_B = self.sums((values_B - self.means(values_B)).square())
        divisor_B = (self.sizes_B - 1).clamp(min=1) if kind == "unbiased" else self.sizes_B
        return (squares_B / divisor_B).sqrt()


def group_relative_advantages(
    rewards_B: Tensor,
    groups_B: Tensor,
    scale: Literal["group", "batch", "none"],
    deviation: Deviation = "unbiased",
    epsilon: float = EPSILON,
) -> Tensor:
    """Return rewards minus their group's mean, over the standard deviation that `scale` names plus `epsilon`.

    A group of one row has advantage 0.
    """
    rewards, groups = rewards_B.double(), Groups(groups_B)
    centred_B = rewards - groups.means(rewards)
    if scale == "none":
        return centred_B.to(rewards_B)
    scale_B = groups.deviations(rewards, deviation) if scale == "group" else _deviation(rewards, deviation)
    # Equal rewards have no deviation; their advantages are exactly 0 even without an epsilon.
    return torch.where(centred_B == 0, 0.0, centred_B / (scale_B + epsilon)).to(rewards_B)


def whitened(
    values: Tensor, kind: Deviation = "unbiased", *, centre: bool = True, copies: Tensor | None = None
) -> Tensor:
    """Return the values over their standard deviation, minus their mean if `centre`; equal values become 0.

    Pass `centre=False` for values that are centred already, so that zeros stay 0. Each value counts `copies` times.
    """
    values_64 = values.double()
    if centre:
        values_64 = values_64 - _counted(values_64, copies).mean()
    scale = _deviation(_counted(values_64, copies), kind)
    return torch.where(values_64 == 0, 0.0, values_64 / (scale + _WHITENING_EPSILON)).to(values)


def _counted(values: Tensor, copies: Tensor | None) -> Tensor:
    return values if copies is None else values.repeat_interleave(copies)


def _deviation(values: Tensor, kind: Deviation) -> Tensor:
    return values.std(correction=int(kind == "unbiased")) if values.numel() > 1 else values.new_zeros(())


def row_sums(values_R: Tensor, lengths_B: Tensor) -> Tensor:
    """Return the sum over each row's tokens [B]."""
    row_R = torch.arange(len(lengths_B)).repeat_interleave(lengths_B)
    return values_R.new_zeros(len(lengths_B)).index_add_(0, row_R, values_R)


def sums_to_row_end(values_R: Tensor, lengths_B: Tensor) -> Tensor:
    """Return at each token the sum over it and all later tokens of its row [R]."""
    rows = values_R.split(lengths_B.tolist())
    return torch.cat([row.flip(0).cumsum(0).flip(0) for row in rows]) if rows else values_R
