"""PPO: generalized advantages from a critic's values, and the clipped loss (arXiv:1707.06347, Eq. 7 and 11).

    r_t = R with the last token, less kl_coef KL of each
    G_t = r_t + gamma ((1 - lam) V_t+1 + lam G_t+1), which the critic learns
    A_t = G_t - V_t, normalised over the batch's tokens
    L   = -min(r A, clip(r, 1 - low, 1 + high) A), with the ratio r = p / p_old

The reward's form is that of Ziegler et al. 2019 (arXiv:1909.08593): it comes with a response's last token, and each
token's is lowered by the KL estimate to the reference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Gt, Interval
from torch import Tensor

from spmdrl.algorithms.clipped import Clipped, ClippedConfig
from spmdrl.algorithms.terms.advantages import Deviation, row_sums, whitened
from spmdrl.algorithms.terms.kl import KlEstimator, adapted_kl_coef
from spmdrl.nouns import CreditInputs


@dataclass(frozen=True)
class ActorCriticConfig(ClippedConfig):
    """Advantages from the values of a critic, whose section has gamma and lambda."""

    kl_in: Literal["loss", "reward"] = "reward"
    """reward: each token's reward is lowered by its KL term (arXiv:1909.08593); loss: it is added to each token's
    loss"""
    kl_estimator: KlEstimator = "k1"
    """estimator of the KL divergence (Schulman 2020, "Approximating KL Divergence"); k1 can't be used in the loss"""
    kl_target: Annotated[float, Gt(0)] | None = None
    """KL divergence from the reference, in nats per response, that kl_coef is raised or lowered towards after each step
    (arXiv:1909.08593, section 2.2); null: kl_coef stays"""
    kl_gain: Annotated[float, Interval(gt=0, le=1)] = 0.1
    """the most that kl_coef changes in a step is a fifth of this, as a share; verl's and TRL's horizon h is a gain of
    responses per step / h"""
    whiten: bool = True
    """whether advantages get mean 0 and standard deviation 1 over all tokens of the batch"""
    std: Deviation = "unbiased"
    """the standard deviation of n values divides by n - 1 (unbiased; verl) or n (biased; OpenRLHF)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_target is None and self.kl_gain != type(self).kl_gain:
            raise ValueError(
                f"algo.kl_gain is {self.kl_gain}, but without algo.kl_target nothing is adapted; set algo.kl_target, "
                "or leave algo.kl_gain out"
            )
        if self.kl_target is not None and not self.kl_in_credit:
            raise ValueError(
                f"algo.kl_target is {self.kl_target}, but algo.kl_coef is {self.kl_coef} and algo.kl_in {self.kl_in}: "
                "what is adapted is a coefficient above 0 of the KL term in the reward; set algo.kl_coef to the one to "
                "begin with and algo.kl_in to reward, or leave algo.kl_target out"
            )


@dataclass(frozen=True)
class PpoConfig(ActorCriticConfig):
    """Generalized advantages from a critic's values (arXiv:1707.06347, arXiv:1506.02438)."""

    name: Literal["ppo"] = "ppo"
    """the algorithm"""


@dataclass(frozen=True)
class Ppo(Clipped):
    """A = G - V: the lambda-return, which the critic learns, less the value before the update."""

    config: ActorCriticConfig

    def columns_for_credit(self) -> frozenset[str]:
        return super().columns_for_credit() | {"returns", "values"}

    def columns_for_returns(self) -> frozenset[str]:
        return super().columns_for_credit()

    def token_rewards(self, inputs: CreditInputs) -> Tensor:
        rewards_R = super().token_rewards(inputs)
        return rewards_R - self.config.kl_coef * self.generated_kl(inputs) if self.config.kl_in_credit else rewards_R

    @property
    def adapted_keys(self) -> frozenset[str]:
        return frozenset({"kl_coef"} if self.config.kl_target is not None else ())

    def adapted(self, inputs: CreditInputs) -> Mapping[str, float]:
        config = self.config
        if config.kl_target is None:
            return {}
        divergence = float(self._row_kl(inputs).mean())
        if not math.isfinite(divergence):
            # The update is skipped, and leaves the coefficient as it leaves the weights.
            return {"kl_coef": config.kl_coef}
        return {"kl_coef": adapted_kl_coef(config.kl_coef, divergence, target=config.kl_target, gain=config.kl_gain)}

    def credit_metrics(self, inputs: CreditInputs) -> Mapping[str, Tensor]:
        metrics = super().credit_metrics(inputs)
        if self.config.kl_target is None:
            return metrics
        kl_coef = torch.tensor(self.config.kl_coef, dtype=torch.float64)
        return {**metrics, "kl_per_response": self._row_kl(inputs), "kl_coef": kl_coef}

    def _row_kl(self, inputs: CreditInputs) -> Tensor:
        """The KL estimate of each whole response [B]."""
        return row_sums(self.generated_kl(inputs).double(), inputs.lengths_B)

    def advantages(self, inputs: CreditInputs) -> Tensor:
        advantages_R = inputs.columns.values("returns") - inputs.columns.values("values")
        if not self.config.whiten:
            return advantages_R
        copies_R = inputs.columns.dense("copies").repeat_interleave(inputs.lengths_B) if self.draws_rows else None
        return whitened(advantages_R, self.config.std, copies=copies_R)
