"""What an algorithm is: its settings, the columns it reads, how it credits rewards, and its loss.

Shape letters: `B` rows, `R` response tokens of those rows, packed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from spmdrl.algorithms.terms.correction import DEFAULT_CLIPS, CorrectionRule, RolloutIs, correction_rule
from spmdrl.algorithms.terms.kl import KlEstimator, KlGradient, kl_estimate, kl_loss
from spmdrl.algorithms.terms.losses import (
    BOUNDED,
    LossAggregation,
    is_beyond_bound,
    sequence_mean,
    token_weights,
    weighted,
)
from spmdrl.nouns import CreditInputs, CreditSettings, LossScope, TokenLoss, TokenTerms


@dataclass(frozen=True)
class AlgoConfig:
    """What to learn from the rewards; each algorithm adds its own settings in a subclass beside its functions."""

    name: str
    """the algorithm"""
    kl_coef: Annotated[float, Ge(0)] = 0.0
    """weight of the KL divergence from the reference model; 0: no reference model is loaded"""
    kl_in: Literal["loss", "reward", "advantage"] = "loss"
    """loss: the KL term is added to each token's loss; reward: its sum over a row is subtracted from the reward before
    advantages are computed; advantage: its sum over a token and all later ones is subtracted from the token's
    advantage"""
    kl_estimator: KlEstimator = "k3"
    """estimator of the KL divergence (Schulman 2020, "Approximating KL Divergence"); k1 can't be used in the loss"""
    kl_gradient: KlGradient = "plain"
    """how the KL term in the loss is differentiated; plain: as it stands, with the tokens taken as given (the GRPO
    paper); importance: weighted by the probability ratio to the policy that the step began with, which is exact for the
    policy being trained (DeepSeek-V3.2, TRL); straight_through: the estimate's value with the gradient of k2 (verl's
    k1+ and k3+)"""
    entropy_coef: float = 0.0
    """weight of the policy's entropy, which is subtracted from each token's loss: a bonus where it is above 0"""
    loss_agg: LossAggregation = "token-mean"
    """how token losses become one number; token-mean: mean over all tokens; seq-mean-...: mean over rows of a row's
    mean (token-mean), sum (token-sum), or sum / rollout.max_completion_length (token-sum-norm, Dr. GRPO)"""
    rollout_is: RolloutIs = "none"
    """how tokens are weighted by trainer's / generator's probability; importance: by it; tis: capped at C; icepop:
    tokens outside [alpha, beta] dropped; seq-mask-tis: rows outside [alpha, beta] dropped, the others' tokens capped at
    C"""
    rollout_is_clip: float | tuple[float, ...] | None = None
    """C of tis, [alpha, beta] of icepop or [alpha, beta, C] of seq-mask-tis; null: 2.0, [0.5, 5.0] or [0.5, 5.0,
    2.0]"""
    rollout_is_sequence: Literal["mean", "sum"] = "mean"
    """what seq-mask-tis compares with its bounds; mean: the geometric mean of a row's ratios (OpenRLHF); sum: their
    product (TRL), which leaves its bounds sooner the longer a row is"""
    off_policy_bound: Annotated[float, Gt(0)] | None = None
    """rows with a negative advantage are left out of the loss where log(generator's / present policy's probability) has
    a mean above this, in nats (off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556, Eq. 9); null: none are"""

    def __post_init__(self) -> None:
        if self.kl_in_loss and self.kl_estimator == "k1" and self.kl_gradient == "plain":
            raise ValueError(
                f"algo.kl_in is loss and algo.kl_estimator is k1 (algo.kl_coef {self.kl_coef}), but k1's gradient is "
                "that of the log-prob alone, whose expectation is 0: nothing would be pulled back to the reference; "
                "set algo.kl_estimator to k3 or k2, algo.kl_in to reward, or algo.kl_gradient to importance"
            )
        if self.kl_in_credit and self.kl_gradient != "plain":
            raise ValueError(
                f"algo.kl_gradient is {self.kl_gradient}, but algo.kl_in is {self.kl_in}, where the KL term has no "
                "gradient; leave algo.kl_gradient out, or set algo.kl_in to loss"
            )
        if self.rollout_is != "none":
            correction_rule(self.rollout_is, self.rollout_is_clip, self.rollout_is_sequence)
        elif self.rollout_is_clip is not None:
            raise ValueError(
                f"algo.rollout_is_clip is {self.rollout_is_clip}, but algo.rollout_is is none, which bounds nothing; "
                f"name a rule ({', '.join(DEFAULT_CLIPS)}) or leave algo.rollout_is_clip out"
            )
        if self.rollout_is_sequence != "mean" and self.rollout_is != "seq-mask-tis":
            raise ValueError(
                f"algo.rollout_is_sequence is {self.rollout_is_sequence}, but algo.rollout_is {self.rollout_is} looks "
                "at tokens alone; set algo.rollout_is to seq-mask-tis, or leave algo.rollout_is_sequence out"
            )

    @property
    def changed(self) -> dict[str, tuple[object, object]]:
        """Keys that aren't at the algorithm's own defaults, which are its paper's: the value and the default."""
        values = {entry.name: (getattr(self, entry.name), entry.default) for entry in fields(self)}
        return {name: (value, default) for name, (value, default) in values.items() if value != default}

    @property
    def correction(self) -> CorrectionRule | None:
        """The rule that `rollout_is` and `rollout_is_clip` name."""
        return (
            None
            if self.rollout_is == "none"
            else correction_rule(self.rollout_is, self.rollout_is_clip, self.rollout_is_sequence)
        )

    @property
    def weighs_by_old(self) -> bool:
        """Whether the loss of a token has a weight that compares with the policy that the step began with."""
        return self.correction is not None or (self.kl_in_loss and self.kl_gradient == "importance")

    @property
    def kl_in_loss(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "loss"

    @property
    def kl_in_credit(self) -> bool:
        """Whether the KL term lowers rewards or advantages."""
        return self.kl_coef > 0 and self.kl_in != "loss"


@dataclass(frozen=True)
class Algorithm(ABC):
    """Pure functions over tensors; the set of stages follows from the columns they read.

    A new algorithm brings `advantages` (or what `FromRewards` makes them of) and `policy_loss` (`Clipped` has PPO's).
    """

    config: AlgoConfig

    @property
    def min_responses(self) -> int:
        """The fewest responses per prompt that its advantages can be made from."""
        return 1

    @property
    def unit_size(self) -> int:
        """How many rows the loss takes together, all that `select` leaves of a prompt; 1: each by itself."""
        return 1

    @property
    def max_refills(self) -> int:
        """How often a step may generate more prompts in place of those that `select` leaves out as a whole.

        `select` is then called during generation too, with columns of responses and rewards alone.
        """
        return 0

    def conflict(self, settings: CreditSettings) -> str | None:
        """What of the algorithm's settings doesn't go with others of the run, and a way out; None where all do."""
        return None

    @property
    def draws_rows(self) -> bool:
        """Whether `copies` draws the rows to train on."""
        return False

    @property
    def num_likeliest(self) -> int:
        """How many of a teacher's likeliest tokens `policy_loss` rates in the place of each response token."""
        return 0

    def columns_for_credit(self) -> frozenset[str]:
        """Columns that `advantages` needs beside the reward."""
        return frozenset({"ref_logprobs", "rollout_logprobs"} if self.config.kl_in_credit else ())

    def columns_for_returns(self) -> frozenset[str]:
        """Columns that `token_rewards` needs beside the reward."""
        return frozenset()

    def columns_for_loss(self, num_updates: int) -> frozenset[str]:
        """Columns that `loss` needs when a batch is used for `num_updates` optimizer steps."""
        columns = {"advantages"}
        if self.config.correction is not None or self.config.off_policy_bound is not None:
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
        """The values of those keys in the next step, by all rows of this one; the same on every rank."""
        return {}

    def needs_signal(self) -> bool:
        """Whether a row whose advantage is 0 has no gradient, so that an update may leave it out."""
        return not self.config.kl_in_loss and self.config.entropy_coef == 0

    def token_kl(self, logprobs_R: Tensor, ref_logprobs_R: Tensor) -> Tensor:
        """The estimate of KL(policy || reference) at each response token [R]."""
        return kl_estimate(logprobs_R, ref_logprobs_R, self.config.kl_estimator)

    def select(self, inputs: CreditInputs) -> Mapping[str, Tensor]:
        """The rows to leave out of the update [B] (bool), by the reason; here those without a reward.

        Advantages are made from the other rows alone, and normalisers count only them. The same on every rank, as it
        sees all rows; a subclass adds to what its base leaves out.
        """
        return {"no_reward": inputs.rewards_B.isnan()}

    def copies(self, inputs: CreditInputs) -> Tensor | None:
        """How often each row is trained on [B] (int64), where rows are drawn; None: once each.

        The others get them in the column `copies`; a row with 0 copies must be among what `select` leaves out.
        """
        return None

    @abstractmethod
    def advantages(self, inputs: CreditInputs) -> Tensor:
        """Advantages of the rows that are left: one per row [B], or one per response token [R].

        Sums are float64; the result has the dtype of the rewards.
        """

    def token_rewards(self, inputs: CreditInputs) -> Tensor:
        """The reward of each response token [R], which a critic's returns are sums of: a row's comes with its last."""
        rewards_R = inputs.rewards_B.new_zeros(int(inputs.lengths_B.sum()))
        rewards_R[inputs.lengths_B.cumsum(0) - 1] = inputs.rewards_B
        return rewards_R

    def credit_metrics(self, inputs: CreditInputs) -> Mapping[str, Tensor]:
        """What to report of all rows, each the mean of its values; here the KL, where the loss doesn't report it."""
        return {"kl": self.generated_kl(inputs)} if self.config.kl_in_credit else {}

    def generated_kl(self, inputs: CreditInputs) -> Tensor:
        """The KL estimate at each response token [R], under the policy that generated it."""
        return self.token_kl(inputs.columns.values("rollout_logprobs"), inputs.columns.values("ref_logprobs"))

    def loss(self, terms: TokenTerms) -> TokenLoss:
        """The policy loss per token, weighted by `rollout_is`, with the KL term where the loss has one."""
        columns = terms.columns
        # In the only update of a batch the old policy is the one being trained: the ratio is 1, its gradient isn't 0.
        old_logprobs_R = columns.get("old_logprobs", terms.logprobs_R.detach())
        policy = self.policy_loss(terms, old_logprobs_R)
        loss_R, metrics = policy.loss_R, {"entropy": terms.entropy_R, **policy.metrics}
        bounded_R = metrics.get(BOUNDED, torch.zeros_like(loss_R)) > 0
        if self.config.correction is not None:
            off_policy_R = old_logprobs_R - columns["rollout_logprobs"]
            correction = self.config.correction(off_policy_R, terms.row_of_token_R, terms.num_rows)
            loss_R = weighted(loss_R, correction.weights_R)
            metrics |= correction.metrics
            bounded_R = bounded_R | is_beyond_bound(off_policy_R)
        if self.config.off_policy_bound is not None:
            kept_R = self._near_policy(terms, self.config.off_policy_bound)
            loss_R, metrics["off_policy/masked_share"] = weighted(loss_R, kept_R), 1 - kept_R
        if self.config.kl_in_loss:
            kl_R = self.token_kl(terms.logprobs_R, columns["ref_logprobs"])
            loss_R = loss_R + self.config.kl_coef * self._kl_loss(terms, old_logprobs_R)
            metrics["kl"] = kl_R
            bounded_R = bounded_R | is_beyond_bound(columns["ref_logprobs"] - terms.logprobs_R)
        if self.config.entropy_coef != 0:
            loss_R = loss_R - self.config.entropy_coef * terms.entropy_R
        return TokenLoss(loss_R, metrics | {BOUNDED: bounded_R.float()})

    def _near_policy(self, terms: TokenTerms, bound: float) -> Tensor:
        """1.0 at tokens of rows that `off_policy_bound` keeps, else 0.0 [R]."""
        drift_R = terms.columns["rollout_logprobs"] - terms.logprobs_R.detach()
        far_R = sequence_mean(drift_R, terms.row_of_token_R, terms.num_rows) > bound
        return 1 - (far_R & (terms.columns["advantages"] < 0)).to(drift_R)

    def _kl_loss(self, terms: TokenTerms, old_logprobs_R: Tensor) -> Tensor:
        config = self.config
        reference_R = terms.columns["ref_logprobs"]
        return kl_loss(terms.logprobs_R, reference_R, old_logprobs_R, config.kl_estimator, config.kl_gradient)

    @abstractmethod
    def policy_loss(self, terms: TokenTerms, old_logprobs_R: Tensor) -> TokenLoss:
        """The policy's own part of the loss per response token, from its log-probs and those the step began with."""

    def token_weights(self, lengths_B: Tensor, scope: LossScope) -> Tensor:
        """The weight of each response token [R] (float64), so that the weighted sum over all ranks is the loss."""
        return token_weights(lengths_B, self.config.loss_agg, scope)
