"""What an algorithm is: the columns it reads, how it credits rewards, and its loss.

Shape letters: `B` rows, `R` response tokens of those rows, packed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.algorithms.advantages import row_sums, sums_to_row_end
from spmdrl.algorithms.algo_config import AlgoConfig
from spmdrl.algorithms.kl import kl_estimate
from spmdrl.algorithms.losses import BOUNDED, ClipRange, clipped_policy, token_weights
from spmdrl.algorithms.ratios import is_beyond_bound
from spmdrl.types import CreditInputs, LossScope, TokenLoss, TokenTerms


@dataclass(frozen=True)
class Algorithm(ABC):
    """Pure functions over tensors; the set of stages follows from the columns they read.

    A new algorithm overrides `row_advantages`, and what else of it differs from PPO's clipped loss with token ratios.
    """

    config: AlgoConfig

    @property
    def min_responses(self) -> int:
        """The fewest responses per prompt that its advantages can be made from."""
        return 1

    def columns_for_credit(self) -> frozenset[str]:
        """Columns that `advantages` needs beside the reward."""
        return frozenset({"ref_logprobs", "rollout_logprobs"} if self.config.kl_in_credit else ())

    def columns_for_loss(self, num_updates: int) -> frozenset[str]:
        """Columns that `loss` needs when a batch is used for `num_updates` optimizer steps."""
        columns = {"advantages"}
        if self.config.correction is not None:
            columns.add("rollout_logprobs")
        if num_updates > 1:
            columns.add("old_logprobs")
        if self.config.kl_in_loss:
            columns.add("ref_logprobs")
        return frozenset(columns)

    def needs_signal(self) -> bool:
        """Whether a row whose advantage is 0 has no gradient, so that an update may leave it out."""
        return not self.config.kl_in_loss

    def token_kl(self, logprobs_R: Tensor, ref_logprobs_R: Tensor) -> Tensor:
        """The estimate of KL(policy || reference) at each response token [R]."""
        return kl_estimate(logprobs_R, ref_logprobs_R, self.config.kl_estimator)

    def select(self, inputs: CreditInputs) -> Mapping[str, Tensor]:
        """The rows to leave out of the update [B] (bool), by the reason; here those without a reward.

        Advantages are made from the other rows alone, and normalisers count only them. The same on every rank, as it
        sees all rows; a subclass adds to what its base leaves out.
        """
        return {"no_reward": inputs.rewards_B.isnan()}

    def advantages(self, inputs: CreditInputs) -> Tensor:
        """Advantages of the rows that are left: one per row [B], or one per response token [R]."""
        if not self.config.kl_in_credit:
            return self.row_advantages(inputs.rewards_B, inputs.groups_B)
        kl_R, lengths_B, kl_coef = self._generated_kl(inputs), inputs.lengths_B, self.config.kl_coef
        if self.config.kl_in == "reward":
            return self.row_advantages(inputs.rewards_B - kl_coef * row_sums(kl_R, lengths_B), inputs.groups_B)
        advantages_B = self.row_advantages(inputs.rewards_B, inputs.groups_B)
        return advantages_B.repeat_interleave(lengths_B) - kl_coef * sums_to_row_end(kl_R, lengths_B)

    def credit_metrics(self, inputs: CreditInputs) -> Mapping[str, Tensor]:
        """What to report of all rows, each the mean of its values; here the KL, where the loss doesn't report it."""
        return {"kl": self._generated_kl(inputs)} if self.config.kl_in_credit else {}

    def _generated_kl(self, inputs: CreditInputs) -> Tensor:
        """The KL estimate at each response token [R], under the policy that generated it."""
        return self.token_kl(inputs.columns.values("rollout_logprobs"), inputs.columns.values("ref_logprobs"))

    @abstractmethod
    def row_advantages(self, rewards_B: Tensor, groups_B: Tensor) -> Tensor:
        """The advantage of each row [B] from the rewards of a whole batch; `groups_B` numbers the prompts."""

    def loss(self, terms: TokenTerms) -> TokenLoss:
        """The policy loss per token, weighted as `rollout_is` says, with the KL term where the loss has one."""
        columns = terms.columns
        # In the only update of a batch the old policy is the one being trained: the ratio is 1, its gradient isn't 0.
        old_logprobs_R = columns.get("old_logprobs", terms.logprobs_R.detach())
        policy = self.policy_loss(terms, old_logprobs_R)
        loss_R, metrics = policy.loss_R, {"entropy": terms.entropy_R, **policy.metrics}
        bounded_R = metrics.get(BOUNDED, torch.zeros_like(loss_R)) > 0
        if self.config.correction is not None:
            off_policy_R = old_logprobs_R - columns["rollout_logprobs"]
            correction = self.config.correction(off_policy_R, terms.row_of_token_R, terms.num_rows)
            # Not a product alone: 0 times what isn't finite would be NaN.
            loss_R = torch.where(correction.weights_R == 0, 0.0, correction.weights_R * loss_R)
            metrics |= correction.metrics
            bounded_R = bounded_R | is_beyond_bound(off_policy_R)
        if self.config.kl_in_loss:
            kl_R = self.token_kl(terms.logprobs_R, columns["ref_logprobs"])
            loss_R = loss_R + self.config.kl_coef * kl_R
            metrics["kl"] = kl_R
            bounded_R = bounded_R | is_beyond_bound(columns["ref_logprobs"] - terms.logprobs_R)
        return TokenLoss(loss_R, metrics | {BOUNDED: bounded_R.float()})

    def policy_loss(self, terms: TokenTerms, old_logprobs_R: Tensor) -> TokenLoss:
        """The policy's own part of the loss: PPO's, with a ratio per token."""
        clip = ClipRange(self.config.clip_ratio_low, self.config.clip_ratio_high)
        return clipped_policy(terms.logprobs_R - old_logprobs_R, terms.columns["advantages"], clip)

    def token_weights(self, lengths_B: Tensor, scope: LossScope) -> Tensor:
        """The weight of each response token [R], so that the weighted sum over all ranks is the loss."""
        return token_weights(lengths_B, self.config.loss_agg, scope)
