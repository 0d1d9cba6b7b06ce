"""PPO: generalized advantages from a critic's values, and the clipped loss (arXiv:1707.06347, Eq. 7 and 11).

In the form that RLHF gave it (Ziegler et al. 2019, arXiv:1909.08593): the reward comes with a response's last token,
and each token's reward is lowered by the KL estimate to the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from spmdrl.algorithms.clipped import Clipped, ClippedConfig
from spmdrl.algorithms.terms.advantages import Deviation, whitened
from spmdrl.algorithms.terms.kl import KlEstimator
from spmdrl.types import CreditInputs


@dataclass(frozen=True)
class PpoConfig(ClippedConfig):
    """Advantages from the values of a critic, whose section has gamma and lambda (arXiv:1707.06347)."""

    name: Literal["ppo"] = "ppo"
    """the algorithm"""
    kl_in: Literal["loss", "reward"] = "reward"
    """reward: each token's reward is lowered by its KL term (arXiv:1909.08593); loss: it is added to each token's
    loss"""
    kl_estimator: KlEstimator = "k1"
    """estimator of the KL divergence (Schulman 2020, "Approximating KL Divergence"); k1 can't be used in the loss"""
    whiten: bool = True
    """whether advantages get mean 0 and standard deviation 1 over all tokens of the batch"""
    std: Deviation = "unbiased"
    """the standard deviation of n values divides by n - 1 (unbiased; verl) or n (biased; OpenRLHF)"""


@dataclass(frozen=True)
class Ppo(Clipped):
    """A = G - V: the lambda-return, which the critic learns, less the value before the update."""

    config: PpoConfig

    def columns_for_credit(self) -> frozenset[str]:
        return super().columns_for_credit() | {"returns", "values"}

    def columns_for_returns(self) -> frozenset[str]:
        return super().columns_for_credit()

    def token_rewards(self, inputs: CreditInputs) -> Tensor:
        rewards_R = super().token_rewards(inputs)
        return rewards_R - self.config.kl_coef * self.generated_kl(inputs) if self.config.kl_in_credit else rewards_R

    def advantages(self, inputs: CreditInputs) -> Tensor:
        advantages_R = inputs.columns.values("returns") - inputs.columns.values("values")
        return whitened(advantages_R, self.config.std) if self.config.whiten else advantages_R
