"""PPO: generalized advantages from a critic's values, and the clipped loss (arXiv:1707.06347, Eq. 7 and 11).

    r_t = R with the last token, an environment's rewards of turns with theirs, less kl_coef KL of each
    G_t = r_t + gamma ((1 - lam) V_t+1 + lam G_t+1), which the critic learns
    A_t = G_t - V_t, normalised over the batch's tokens
    L   = -min(r A, clip(r, 1 - low, 1 + high) A), with the ratio r = p / p_old

The reward's form is that of Ziegler et al. 2019 (arXiv:1909.08593): it comes with a response's last token, and each
token's reward is lowered by the KL estimate to the reference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.algorithms.policy_gradient import Clipped
from spmdrl.algorithms.settings.actor_critic_configs import ActorCriticConfig
from spmdrl.algorithms.terms.advantages import row_sums, whitened
from spmdrl.algorithms.terms.kl import adapted_kl_coef
from spmdrl.nouns.batch import CreditInputs


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
            # The update is skipped: the coefficient stays, as the weights do.
            return {"kl_coef": config.kl_coef}
        return {"kl_coef": adapted_kl_coef(config.kl_coef, divergence, target=config.kl_target, gain=config.kl_gain)}

    def credit_metrics(self, inputs: CreditInputs) -> Mapping[str, Tensor]:
        metrics = super().credit_metrics(inputs)
        if self.config.kl_target is None:
            return metrics
        kl_coef = torch.tensor(self.config.kl_coef, dtype=torch.float64)
        return {**metrics, "kl_per_response": self._row_kl(inputs), "kl_coef": kl_coef}

    def _row_kl(self, inputs: CreditInputs) -> Tensor:
        """Return the KL estimate of each whole response [B]."""
        return row_sums(self.generated_kl(inputs).double(), inputs.lengths_B)

    def advantages(self, inputs: CreditInputs) -> Tensor:
        advantages_R = inputs.columns.values("returns") - inputs.columns.values("values")
        copies_R = inputs.columns.dense("copies").repeat_interleave(inputs.lengths_B) if self.draws_rows else None
        return whitened(advantages_R, self.config.std, copies=copies_R)
