"""GRPO: group-relative advantages and the clipped loss (DeepSeekMath, arXiv:2402.03300, Eq. 3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.algorithms.advantages import group_relative_advantages
from spmdrl.algorithms.algorithm import AlgoConfig
from spmdrl.algorithms.kl import kl_estimate
from spmdrl.algorithms.losses import (
    ClipRange,
    clipped_policy_loss,
    clipped_tokens,
    sequence_log_ratio,
    token_weights,
)
from spmdrl.algorithms.ratios import is_beyond_bound
from spmdrl.types import CreditInputs, LossScope, TokenLoss, TokenTerms


@dataclass(frozen=True)
class Grpo:
    """With clip_ratio_high above clip_ratio_low it has DAPO's clip-higher; with ratio_level sequence it is GSPO."""

    config: AlgoConfig

    def columns_for_credit(self) -> frozenset[str]:
        uses_reference = self.config.kl_coef > 0 and self.config.kl_in == "reward"
        return frozenset({"ref_logprobs", "rollout_logprobs"}) if uses_reference else frozenset()

    def columns_for_loss(self, num_updates: int) -> frozenset[str]:
        columns = {"advantages"}
        if self.config.correction is not None:
            columns.add("rollout_logprobs")
        if num_updates > 1:
            columns.add("old_logprobs")
        if self.config.kl_coef > 0 and self.config.kl_in == "loss":
            columns.add("ref_logprobs")
        return frozenset(columns)

    def needs_signal(self) -> bool:
        return self.config.kl_coef == 0 or self.config.kl_in == "reward"

    def token_kl(self, logprobs_R: Tensor, ref_logprobs_R: Tensor) -> Tensor:
        return kl_estimate(logprobs_R, ref_logprobs_R, self.config.kl_estimator)

    def advantages(self, inputs: CreditInputs) -> Tensor:
        rewards_B = inputs.rewards_B
        if inputs.kl_B is not None:
            rewards_B = rewards_B - self.config.kl_coef * inputs.kl_B
        return group_relative_advantages(rewards_B, inputs.groups_B, self.config.scale_rewards)

    def loss(self, terms: TokenTerms) -> TokenLoss:
        config, columns = self.config, terms.columns
        advantages_R = columns["advantages"]
        # In the only update of a batch the old policy is the one being trained: the ratio is 1, its gradient isn't 0.
        old_logprobs_R = columns.get("old_logprobs", terms.logprobs_R.detach())
        log_ratio_R = terms.logprobs_R - old_logprobs_R
        if config.ratio_level == "sequence":
            log_ratio_R = sequence_log_ratio(log_ratio_R, terms.row_of_token_R, terms.num_rows)
        clip = ClipRange(config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_c)
        loss_R = clipped_policy_loss(log_ratio_R, advantages_R, clip)
        low_R, high_R = clipped_tokens(log_ratio_R, advantages_R, clip)
        metrics = {"entropy": terms.entropy_R, "clip_ratio/low_mean": low_R, "clip_ratio/high_mean": high_R}
        bounded_R = is_beyond_bound(log_ratio_R)
        if config.correction is not None:
            off_policy_R = old_logprobs_R - columns["rollout_logprobs"]
            correction = config.correction(off_policy_R, terms.row_of_token_R, terms.num_rows)
            # Not a product alone: 0 times what isn't finite would be NaN.
            loss_R = torch.where(correction.weights_R == 0, 0.0, correction.weights_R * loss_R)
            metrics |= correction.metrics
            bounded_R = bounded_R | is_beyond_bound(off_policy_R)
        if "ref_logprobs" in columns:
            kl_R = self.token_kl(terms.logprobs_R, columns["ref_logprobs"])
            loss_R = loss_R + config.kl_coef * kl_R
            metrics["kl"] = kl_R
            bounded_R = bounded_R | is_beyond_bound(columns["ref_logprobs"] - terms.logprobs_R)
        metrics["clip_ratio/bounded_share"] = bounded_R.float()
        return TokenLoss(loss_R, metrics)

    def token_weights(self, lengths_B: Tensor, scope: LossScope) -> Tensor:
        return token_weights(lengths_B, self.config.loss_agg, scope)
