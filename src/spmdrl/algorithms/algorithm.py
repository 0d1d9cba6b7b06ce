"""Base of algorithms: settings, columns read, credit for rewards, and the loss.

Shape letters: `B` rows, `R` response tokens of those rows, packed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.algorithms.settings.algo_config import AlgoConfig
from spmdrl.algorithms.terms.advantages import row_sums
from spmdrl.algorithms.terms.correction import CorrectionRule, correction_rule
from spmdrl.algorithms.terms.kl import kl_estimate, kl_loss
from spmdrl.algorithms.terms.losses import BOUNDED, is_beyond_bound, sequence_mean, token_weights, weighted
from spmdrl.nouns.batch import CreditInputs, CreditSettings, LossScope, TokenLoss, TokenTerms


@dataclass(frozen=True)
class Algorithm(ABC):
    """Pure functions over tensors; the set of stages follows from the columns they read.

    A new algorithm brings `advantages` (or what `FromRewards` makes them of) and `policy_loss` (`Clipped` has PPO's).
    """

    config: AlgoConfig

    @property
    def correction(self) -> CorrectionRule | None:
        """The rule that `rollout_is` and `rollout_is_clip` name."""
        rule, clip, sequence = self.config.rollout_is, self.config.rollout_is_clip, self.config.rollout_is_sequence
        return None if rule == "none" else correction_rule(rule, clip, sequence)

    @property
    def min_responses(self) -> int:
        """The fewest responses per prompt that its advantages can be made from."""
        return 1

    @property
    def unit_size(self) -> int:
        """Number of rows that the loss takes together, all that `select` leaves of a prompt; 1: each by itself."""
        return 1

    @property
    def max_refills(self) -> int:
        """Times that a step may generate more prompts in place of those that `select` leaves out as a whole.

        `select` is then called during generation too, with columns of responses and rewards alone.
        """
        return 0

    def conflict(self, settings: CreditSettings) -> str | None:
        """Describe a conflict of the algorithm's settings with others of the run, and a way out; None without one."""
        return None

    @property
    def draws_rows(self) -> bool:
        """True if `copies` draws the rows to train on."""
        return False

    @property
    def num_likeliest(self) -> int:
        """Number of the teacher's likeliest tokens that `policy_loss` rates in place of each response token."""
        return 0

    def columns_for_credit(self) -> frozenset[str]:
        """Return the columns that `advantages` needs beside the reward."""
        return frozenset({"ref_logprobs", "rollout_logprobs"} if self.config.kl_in_credit else ())

    def columns_for_returns(self) -> frozenset[str]:
        """Return the columns that `token_rewards` needs beside the reward."""
        return frozenset()

    def columns_for_loss(self, num_updates: int) -> frozenset[str]:
        """Return the columns that `loss` needs when a batch is used for `num_updates` optimizer steps."""
        columns = {"advantages"}
        if self.correction is not None or self.config.off_policy_bound is not None:
            columns.add("rollout_logprobs")
        if num_updates > 1:
            columns.add("old_logprobs")
        if self.config.kl_in_loss:
            columns.add("ref_logprobs")
        return frozenset(columns)

    @property
    def adapted_keys(self) -> frozenset[str]:
        """The keys of its config that `adapted` changes from step to step."""
        return frozenset()

    def adapted(self, inputs: CreditInputs) -> Mapping[str, float]:
        """Return the values of those keys for the next step, from all rows of this one; the same on every rank."""
        return {}

    def needs_signal(self) -> bool:
        """True if a row of advantage 0 has no gradient, so that an update may leave it out."""
        return not self.config.kl_in_loss and self.config.entropy_coef == 0

    def select(self, inputs: CreditInputs) -> Mapping[str, Tensor]:
        """Return the rows to leave out of the update [B] (bool), by reason; here those without a reward.

        Advantages and normalisers use the other rows alone. The same on every rank, as it sees all rows; a subclass
        adds its own reasons to its base's.
        """
        return {"no_reward": inputs.rewards_B.isnan()}

    def copies(self, inputs: CreditInputs) -> Tensor | None:
        """Return how often each row is trained on [B] (int64), where rows are drawn; None: once each.

        Other functions read the column `copies`; `select` must leave out every row with 0 copies.
        """
        return None

    @abstractmethod
    def advantages(self, inputs: CreditInputs) -> Tensor:
        """Compute advantages of the remaining rows: one per row [B], or one per response token [R].

        Sums are float64; the result has the dtype of the rewards.
        """

    def token_rewards(self, inputs: CreditInputs) -> Tensor:
        """Return the reward of each response token [R], whose sums a critic learns.

        An environment's reward of a turn comes with the turn's last token, the rest of a row's with the row's.
        """
        rewards_R = inputs.rewards_B.new_zeros(int(inputs.lengths_B.sum()))
        if "turn_rewards" in inputs.columns:
            rewards_R += inputs.columns.values("turn_rewards")
        rest_B = (inputs.rewards_B - row_sums(rewards_R.double(), inputs.lengths_B)).to(rewards_R)
        has_tokens_B = inputs.lengths_B > 0
        rewards_R[inputs.lengths_B.cumsum(0)[has_tokens_B] - 1] += rest_B[has_tokens_B]
        return rewards_R

    def credit_metrics(self, inputs: CreditInputs) -> Mapping[str, Tensor]:
        """Return values to report as means over all rows; here the KL, unless the loss reports it."""
        return {"kl": self.generated_kl(inputs)} if self.config.kl_in_credit else {}

    def generated_kl(self, inputs: CreditInputs) -> Tensor:
        """Return the KL estimate at each response token [R], under the policy that generated it."""
        values = inputs.columns.values
        return kl_estimate(values("rollout_logprobs"), values("ref_logprobs"), self.config.kl_estimator)

    def loss(self, terms: TokenTerms) -> TokenLoss:
        """Return the policy loss per token, weighted by `rollout_is`, with the KL term where the loss has one."""
        columns = terms.columns
        # In the only update of a batch the old policy is the one being trained: the ratio is 1, its gradient isn't 0.
        old_logprobs_R = columns.get("old_logprobs", terms.logprobs_R.detach())
        policy = self.policy_loss(terms, old_logprobs_R)
        loss_R, metrics = policy.loss_R, {"entropy": terms.entropy_R, **policy.metrics}
        bounded_R = metrics.get(BOUNDED, torch.zeros_like(loss_R)) > 0
        if self.correction is not None:
            off_policy_R = old_logprobs_R - columns["rollout_logprobs"]
            correction = self.correction(off_policy_R, terms.row_of_token_R, terms.num_rows)
            loss_R = weighted(loss_R, correction.weights_R)
            metrics |= correction.metrics
            bounded_R = bounded_R | is_beyond_bound(off_policy_R)
        if self.config.off_policy_bound is not None:
            kept_R = _near_policy(terms, self.config.off_policy_bound)
            loss_R, metrics["off_policy/masked_share"] = weighted(loss_R, kept_R), 1 - kept_R
        if self.config.kl_in_loss:
            logprobs_R, reference_R, estimator = terms.logprobs_R, columns["ref_logprobs"], self.config.kl_estimator
            kl_R = kl_loss(logprobs_R, reference_R, old_logprobs_R, estimator, self.config.kl_gradient)
            loss_R = loss_R + self.config.kl_coef * kl_R
            metrics["kl"] = kl_estimate(logprobs_R, reference_R, estimator)
            bounded_R = bounded_R | is_beyond_bound(reference_R - logprobs_R)
        if self.config.entropy_coef != 0:
            loss_R = loss_R - self.config.entropy_coef * terms.entropy_R
        return TokenLoss(loss_R, metrics | {BOUNDED: bounded_R.float()})

    @abstractmethod
    def policy_loss(self, terms: TokenTerms, old_logprobs_R: Tensor) -> TokenLoss:
        """Compute the policy's part of the loss per response token from its log-probs and the step's first ones."""

    def token_weights(self, lengths_B: Tensor, scope: LossScope) -> Tensor:
        """Return response tokens' weights [R] (float64), with which the sum over all ranks is the loss."""
        return token_weights(lengths_B, self.config.loss_agg, scope)


def _near_policy(terms: TokenTerms, bound: float) -> Tensor:
    """Return 1.0 at tokens of rows that `off_policy_bound` keeps, else 0.0 [R]."""
    drift_R = terms.columns["rollout_logprobs"] - terms.logprobs_R.detach()
    far_R = sequence_mean(drift_R, terms.row_of_token_R, terms.num_rows) > bound
    return 1 - (far_R & (terms.columns["advantages"] < 0)).to(drift_R)
