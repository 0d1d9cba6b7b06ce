"""GDPO: several rewards, each compared within its group before they are added up (arXiv:2601.05242, Eq. 4 to 6).

    A_k = (R_k - mean of the group) / standard deviation of the group, for each reward function k
    A   = sum over k of weight_k A_k, over its standard deviation in the batch
    L   = -min(r A, clip(r, 1 - low, 1 + high) A) + kl_coef KL

Mean and deviation are over the rows with a value of the function; A_k of the others is 0. In a group with a row that an
environment rewarded, which isn't among the R_k, the whole reward takes the place of all R_k.

Shape letters: `K` reward functions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.algorithms.policy.grpo import Grpo
from spmdrl.algorithms.settings.policy_configs import GdpoConfig
from spmdrl.algorithms.terms.advantages import Groups, whitened
from spmdrl.nouns.batch import CreditInputs


@dataclass(frozen=True)
class Gdpo(Grpo):
    """A = sum of weight times the group-relative advantage by each function, over its standard deviation."""

    config: GdpoConfig

    def columns_for_credit(self) -> frozenset[str]:
        return super().columns_for_credit() | {"reward_parts"}

    def advantages(self, inputs: CreditInputs) -> Tensor:
        rewards_B, groups_B = inputs.rewards_B.double(), inputs.groups_B
        parts_KB = inputs.columns.values("reward_parts").double().view(len(rewards_B), -1).T
        weights_K = parts_KB.new_tensor(inputs.settings.part_weights)
        total_B = weights_K @ torch.stack([self._compared(part_B, groups_B) for part_B in parts_KB])
        is_whole_B = Groups(groups_B).sums(_is_more_than(rewards_B, weights_K[:, None] * parts_KB)) > 0
        total_B = torch.where(is_whole_B, self._compared(rewards_B.where(is_whole_B, torch.nan), groups_B), total_B)
        over_rows = self.config.whiten_over == "rows"
        values = total_B if over_rows else total_B.repeat_interleave(inputs.lengths_B)
        return whitened(values, self.config.std, centre=not over_rows).to(inputs.rewards_B)

    def _compared(self, values_B: Tensor, groups_B: Tensor) -> Tensor:
        """Return the group-relative advantage [B] among the rows that have a value, and 0 for the others."""
        has_value_B = ~values_B.isnan()
        advantages_B = torch.zeros_like(values_B)
        advantages_B[has_value_B] = self.row_advantages(values_B[has_value_B], groups_B[has_value_B])
        return advantages_B


def _is_more_than(rewards_B: Tensor, weighted_KB: Tensor) -> Tensor:
    """Mark rewards [B] that have no parts or aren't their sum, up to float32's rounding."""
    rest_B = rewards_B - weighted_KB.nansum(0)
    return weighted_KB.isnan().all(0) | (rest_B.abs() > 1e-6 * weighted_KB.abs().nansum(0))
