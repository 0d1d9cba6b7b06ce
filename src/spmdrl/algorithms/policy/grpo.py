"""GRPO: group-relative advantages and the clipped loss (DeepSeekMath, arXiv:2402.03300, Eq. 3).

    A = (R - mean of the group) / standard deviation of the group
    r = p / p_old, for each token
    L = -min(r A, clip(r, 1 - low, 1 + high) A) + kl_coef KL

A group is the responses to one prompt. For negative A, L is at most clip_ratio_c |A| where that is set.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spmdrl.algorithms.policy_gradient import Clipped, GroupRelative
from spmdrl.algorithms.settings.policy_configs import GrpoSettings
from spmdrl.algorithms.terms.losses import sequence_mean
from spmdrl.nouns.batch import TokenTerms


@dataclass(frozen=True)
class Grpo(GroupRelative, Clipped):
    """GRPO; clip_ratio_high above clip_ratio_low gives DAPO's clip-higher, ratio_level sequence GSPO."""

    config: GrpoSettings

    def log_ratio(self, terms: TokenTerms, old_logprobs_R: Tensor) -> Tensor:
        log_ratio_R = super().log_ratio(terms, old_logprobs_R)
        if self.config.ratio_level == "token":
            return log_ratio_R
        return sequence_mean(log_ratio_R, terms.row_of_token_R, terms.num_rows)
