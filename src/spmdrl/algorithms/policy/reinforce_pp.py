"""REINFORCE++: no critic, and advantages normalised over the whole batch (arXiv:2501.03262).

reinforce_pp:           A = R - kl_coef KL of this and later tokens, less the batch's mean, over its deviation
reinforce_pp_baseline:  A = R - mean of the group, over the batch's standard deviation; + kl_coef KL in the loss
L = -min(r A, clip(r, 1 - low, 1 + high) A)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from spmdrl.algorithms.clipped import Clipped, ClippedConfig
from spmdrl.algorithms.from_rewards import FromRewards
from spmdrl.algorithms.terms.advantages import Deviation, Groups, whitened
from spmdrl.algorithms.terms.kl import KlEstimator
from spmdrl.nouns import CreditInputs


@dataclass(frozen=True)
class ReinforcePpSettings(ClippedConfig):
    """Settings of both forms."""

    std: Deviation = "unbiased"
    """the standard deviation of n values divides by n - 1 (unbiased; verl) or n (biased; OpenRLHF)"""


@dataclass(frozen=True)
class ReinforcePpConfig(ReinforcePpSettings):
    """Each token's return, normalised over the batch (arXiv:2501.03262, Eq. 6 to 8)."""

    name: Literal["reinforce_pp"] = "reinforce_pp"
    """the algorithm"""
    kl_in: Literal["loss", "reward", "advantage"] = "advantage"
    """advantage: the KL term's sum over a token and all later ones is subtracted from the token's return (the paper);
    reward: its sum over a row is subtracted from the reward; loss: it is added to each token's loss"""
    kl_estimator: KlEstimator = "k1"
    """estimator of the KL divergence (Schulman 2020, "Approximating KL Divergence"); k1 can't be used in the loss"""


@dataclass(frozen=True)
class ReinforcePpBaselineConfig(ReinforcePpSettings):
    """Rewards relative to their group's mean, normalised over the batch (arXiv:2501.03262, section 3.3)."""

    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    """the algorithm"""
    kl_estimator: KlEstimator = "k2"
    """estimator of the KL divergence (Schulman 2020, "Approximating KL Divergence"); k1 can't be used in the loss"""
    whiten_over: Literal["rows", "tokens"] = "rows"
    """what the batch's standard deviation is of; rows: one value per response, whose mean is 0; tokens: one value per
    token, so that long responses count for more, and whose mean is subtracted too (verl)"""


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
