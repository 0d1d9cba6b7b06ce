"""RLOO: REINFORCE with the other responses' mean reward as baseline (Ahmadian et al. 2024, arXiv:2402.14740, Eq. 8).

    R' = R - kl_coef KL of the response
    A  = R' - mean R' of the other responses to the prompt
    L  = -A log p of the response

The paper's action is the whole response: its log-prob is a sum over tokens, its KL is part of its reward, and nothing
is clipped. Options reproduce what TRL, verl and OpenRLHF call RLOO.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spmdrl.algorithms.policy_gradient import Clipped, FromRewards
from spmdrl.algorithms.settings.policy_configs import RlooConfig
from spmdrl.algorithms.terms.advantages import Groups
from spmdrl.algorithms.terms.losses import clipped_policy, sums_and_lengths
from spmdrl.nouns.batch import TokenLoss, TokenTerms


@dataclass(frozen=True)
class Rloo(FromRewards, Clipped):
    """A row's reward less the mean reward of the other responses to its prompt, times the gradient of its log-prob."""

    config: RlooConfig

    @property
    def min_responses(self) -> int:
        return 2

    def columns_for_loss(self, num_updates: int) -> frozenset[str]:
        # Without ratios only corrections compare with the policy that the step began with.
        reads_old = self.config.ratio_level != "none" or self.config.weighs_by_old
        return super().columns_for_loss(num_updates if reads_old else 1)

    def row_advantages(self, rewards_B: Tensor, groups_B: Tensor) -> Tensor:
        groups = Groups(groups_B)
        rewards, others_B = rewards_B.double(), groups.sizes_B - 1
        others_mean_B = (groups.sums(rewards) - rewards) / others_B
        # The only remaining row of a group has no baseline.
        return (rewards - others_mean_B).where(others_B > 0, 0.0).to(rewards_B)

    def policy_loss(self, terms: TokenTerms, old_logprobs_R: Tensor) -> TokenLoss:
        config, advantages_R = self.config, terms.columns["advantages"]
        if config.ratio_level == "none":
            return TokenLoss(-advantages_R * terms.logprobs_R, {})
        if config.ratio_level == "token":
            return super().policy_loss(terms, old_logprobs_R)
        row_R = terms.row_of_token_R
        sums_B, lengths_B = sums_and_lengths(terms.logprobs_R - old_logprobs_R, row_R, terms.num_rows)
        policy = clipped_policy(sums_B[row_R], advantages_R, config.clip)
        # Each token bears an equal part of its row's loss, so that a row's sum is the loss of the paper's one action.
        return TokenLoss(policy.loss_R / lengths_B[row_R], policy.metrics)
