"""Bases of policy-gradient algorithms: advantages from one reward per response, and PPO's clipped loss.

Shape letters: `B` rows, `R` response tokens of those rows, packed.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from spmdrl.algorithms.algorithm import Algorithm
from spmdrl.algorithms.settings.algo_config import ClippedConfig, GroupRelativeConfig
from spmdrl.algorithms.terms.advantages import group_relative_advantages, row_sums, sums_to_row_end
from spmdrl.algorithms.terms.losses import clipped_policy
from spmdrl.nouns.batch import CreditInputs, TokenLoss, TokenTerms


class FromRewards(Algorithm):
    """Advantages per row from rewards; the KL term lowers rewards or advantages, as `kl_in` says."""

    def advantages(self, inputs: CreditInputs) -> Tensor:
        if not self.config.kl_in_credit:
            return self.row_advantages(inputs.rewards_B, inputs.groups_B)
        kl_R, lengths_B, kl_coef = self.generated_kl(inputs), inputs.lengths_B, self.config.kl_coef
        if self.config.kl_in == "reward":
            return self.row_advantages(inputs.rewards_B - kl_coef * row_sums(kl_R, lengths_B), inputs.groups_B)
        advantages_B = self.row_advantages(inputs.rewards_B, inputs.groups_B)
        return advantages_B.repeat_interleave(lengths_B) - kl_coef * sums_to_row_end(kl_R, lengths_B)

    @abstractmethod
    def row_advantages(self, rewards_B: Tensor, groups_B: Tensor) -> Tensor:
        """Return the advantage of each row [B] from the rewards of a whole batch; `groups_B` numbers the prompts.

        Sums are float64; the result has the dtype of the rewards.
        """


@dataclass(frozen=True)
class GroupRelative(FromRewards):
    """A = (R - mean of the group) / standard deviation (GRPO, arXiv:2402.03300)."""

    config: GroupRelativeConfig

    @property
    def min_responses(self) -> int:
        return 2

    def row_advantages(self, rewards_B: Tensor, groups_B: Tensor) -> Tensor:
        config = self.config
        return group_relative_advantages(rewards_B, groups_B, config.scale_rewards, config.std, config.std_epsilon)


@dataclass(frozen=True)
class Clipped(Algorithm):
    """PPO's clipped loss with a probability ratio per token (arXiv:1707.06347, Eq. 7)."""

    config: ClippedConfig

    def policy_loss(self, terms: TokenTerms, old_logprobs_R: Tensor) -> TokenLoss:
        log_ratio_R = self.log_ratio(terms, old_logprobs_R)
        return clipped_policy(log_ratio_R, terms.columns["advantages"], self.config.clip)

    def log_ratio(self, terms: TokenTerms, old_logprobs_R: Tensor) -> Tensor:
        """Return the logarithm of each token's probability ratio [R]."""
        return terms.logprobs_R - old_logprobs_R
