"""PF-PPO: PPO on responses that are drawn by their rewards (policy filtration, arXiv:2409.06957).

    P_i = w_i / sum_j w_j over the responses to a prompt, drawn with replacement as often as there are responses
    w_i = 0.4 for the best, 0.1 for others (best-random); 1 for best and worst, 0 for others (best-worst); |R_i|^power
    A_t = G_t - V_t, normalised over the drawn tokens, and the loss are PPO's

Where rewards are least noisy, at the best and the worst responses, rows are drawn more often than elsewhere. A row
drawn several times keeps its advantage and counts that often, for policy and critic.

Shape letters: `B` rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spmdrl.algorithms.policy.ppo import Ppo
from spmdrl.algorithms.settings.actor_critic_configs import FilterRule, PfPpoConfig
from spmdrl.nouns.batch import CreditInputs

# The authors' weights of best-random.
_BEST_WEIGHT, _OTHERS_WEIGHT = 0.4, 0.1


@dataclass(frozen=True)
class PfPpo(Ppo):
    """PPO on as many drawn rows as have a reward, by w / sum w; equally good responses have equal weights."""

    config: PfPpoConfig

    @property
    def min_responses(self) -> int:
        return 2 if self.config.filter_scope == "prompt" else 1

    @property
    def draws_rows(self) -> bool:
        return True

    def select(self, inputs: CreditInputs) -> Mapping[str, Tensor]:
        is_unscored_B = inputs.rewards_B.isnan()
        return {**super().select(inputs), "filtered": (inputs.columns.dense("copies") == 0) & ~is_unscored_B}

    def copies(self, inputs: CreditInputs) -> Tensor:
        groups_B = inputs.groups_B if self.config.filter_scope == "prompt" else torch.zeros_like(inputs.groups_B)
        copies_B = torch.zeros_like(groups_B)
        scored_B = ~inputs.rewards_B.isnan()
        for group in groups_B[scored_B].unique().tolist():
            members = ((groups_B == group) & scored_B).nonzero().squeeze(1)
            weights = filter_weights(inputs.rewards_B[members].double(), self.config.filter, self.config.filter_power)
            places = drawn_places(weights.numpy(), (inputs.settings.seed, inputs.step, group))
            copies_B[members] = torch.from_numpy(np.bincount(places, minlength=len(members)))
        return copies_B


def filter_weights(rewards: Tensor, rule: FilterRule, power: float) -> Tensor:
    """Return the weight of each response; equal weights where all would be 0."""
    best = rewards == rewards.max()
    if rule == "best-random":
        return torch.where(best, _BEST_WEIGHT, _OTHERS_WEIGHT).double()
    if rule == "best-worst":
        return (best | (rewards == rewards.min())).double()
    weights = rewards.abs() ** power
    return weights if weights.any() else torch.ones_like(weights)


def drawn_places(weights: np.ndarray, key: tuple[int, ...]) -> np.ndarray:
    """Draw as many places as there are weights, with replacement: a pure function of weights and key."""
    # Uniform numbers in [0, 1) from raw bits, which NumPy keeps stable across versions.
    bits = np.random.Philox(np.random.SeedSequence(key)).random_raw(len(weights))
    sums = np.cumsum(weights)
    return np.searchsorted(sums, (bits >> np.uint64(11)) * 2.0**-53 * sums[-1], side="right")
