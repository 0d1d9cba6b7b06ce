"""GDPO: several rewards, each compared with those of its group before they are added up (arXiv:2601.05242, Eq. 4 to 6).

    A_k = (R_k - mean of the group) / standard deviation of the group, for each reward function k
    A   = sum over k of weight_k A_k, over its standard deviation in the batch
    L   = -min(r A, clip(r, 1 - low, 1 + high) A) + kl_coef KL

Shape letters: `K` reward functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from spmdrl.algorithms.policy.grpo import Grpo, GrpoSettings
from spmdrl.algorithms.terms.advantages import whitened
from spmdrl.types import CreditInputs


@dataclass(frozen=True)
class GdpoConfig(GrpoSettings):
    """GRPO that compares each reward function's values by themselves (arXiv:2601.05242)."""

    name: Literal["gdpo"] = "gdpo"
    """the algorithm"""
    whiten_over: Literal["rows", "tokens"] = "rows"
    """what the batch's standard deviation is of; rows: one value per response, whose mean is 0; tokens: one value per
    token, so that long responses count for more, and whose mean is subtracted too (verl)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_in_credit:
            raise ValueError(
                f"algo.kl_in is {self.kl_in} (algo.kl_coef {self.kl_coef}), but gdpo compares several rewards, none of "
                "which the KL term is part of; set algo.kl_in to loss"
            )


@dataclass(frozen=True)
class Gdpo(Grpo):
    """A = sum of weight times the group-relative advantage by each function, over its standard deviation."""

    config: GdpoConfig

    def columns_for_credit(self) -> frozenset[str]:
        return super().columns_for_credit() | {"reward_parts"}

    def advantages(self, inputs: CreditInputs) -> Tensor:
        # A row has a reward, and is here, only where every function gave one.
        parts_KB = inputs.columns.values("reward_parts").double().view(len(inputs.rewards_B), -1).T
        advantages_KB = torch.stack([self.row_advantages(part_B, inputs.groups_B) for part_B in parts_KB])
        total_B = advantages_KB.new_tensor(inputs.settings.part_weights) @ advantages_KB
        over_rows = self.config.whiten_over == "rows"
        values = total_B if over_rows else total_B.repeat_interleave(inputs.lengths_B)
        return whitened(values, self.config.std, centre=not over_rows).to(inputs.rewards_B)
