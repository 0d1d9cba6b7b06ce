"""REINFORCE++: no critic, and advantages normalised over the whole batch (arXiv:2501.03262).

reinforce_pp:           A = R - kl_coef KL of this and later tokens, less the batch's mean, over its deviation
reinforce_pp_baseline:  A = R - mean of the group, over the batch's standard deviation; + kl_coef KL in the loss
L = -min(r A, clip(r, 1 - low, 1 + high) A)
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spmdrl.algorithms.policy_gradient import Clipped, FromRewards
from spmdrl.algorithms.settings.policy_configs import ReinforcePpBaselineConfig, ReinforcePpConfig
from spmdrl.algorithms.terms.advantages import Groups, whitened
from spmdrl.nouns.batch import CreditInputs


@dataclass(frozen=True)
class ReinforcePp(FromRewards, Clipped):
    """A token's advantage is its return, without a baseline, normalised over the tokens of the batch."""

    config: ReinforcePpConfig

    def advantages(self, inputs: CreditInputs) -> Tensor:
        returns = super().advantages(inputs)
        if len(returns) == len(inputs.rewards_B):
            returns = returns.repeat_interleave(inputs.lengths_B)
        return whitened(returns, self.config.std)

    def row_advantages(self, rewards_B: Tensor, groups_B: Tensor) -> Tensor:
        return rewards_B


@dataclass(frozen=True)
class ReinforcePpBaseline(FromRewards, Clipped):
    """A row's advantage is its reward less its group's mean, over the batch's standard deviation."""

    config: ReinforcePpBaselineConfig

    @property
    def min_responses(self) -> int:
        return 2

    def advantages(self, inputs: CreditInputs) -> Tensor:
        centred = super().advantages(inputs)
        is_of_rows = len(centred) == len(inputs.rewards_B)
        if is_of_rows and self.config.whiten_over == "rows":
            return whitened(centred, self.config.std, centre=False)
        return whitened(centred.repeat_interleave(inputs.lengths_B) if is_of_rows else centred, self.config.std)

    def row_advantages(self, rewards_B: Tensor, groups_B: Tensor) -> Tensor:
        return (rewards_B - Groups(groups_B).means(rewards_B)).to(rewards_B)
