"""On-policy distillation: the sampled reverse KL to a teacher as the advantage (Lu and others 2025).

A_t = log p_teacher - log p_generator + reward_coef (R - mean of the group) / standard deviation
L = -min(r A, clip(r, 1 - low, 1 + high) A)

"On-Policy Distillation", Thinking Machines Lab, October 2025; the divergence is that of MiniLLM (arXiv:2306.08543) and
GKD (arXiv:2306.13649). Each token's advantage is its own distance alone; later tokens don't count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.algorithms.policy_gradient import Clipped, GroupRelative
from spmdrl.algorithms.settings.distillation_configs import OpdConfig
from spmdrl.nouns.batch import CreditInputs


@dataclass(frozen=True)
class Opd(GroupRelative, Clipped):
    """A_t = log p_teacher - log p_generator + reward_coef (R - mean) / standard deviation."""

    config: OpdConfig

    @property
    def min_responses(self) -> int:
        return 2 if self.config.reward_coef > 0 else 1

    def columns_for_credit(self) -> frozenset[str]:
        return super().columns_for_credit() | {"rollout_logprobs", "teacher_logprobs"}

    def select(self, inputs: CreditInputs) -> Mapping[str, Tensor]:
        # Without weight on rewards, rows that have none are trained on too.
        return super().select(inputs) if self.config.reward_coef > 0 else {}

    def advantages(self, inputs: CreditInputs) -> Tensor:
        advantages = super().advantages(inputs)
        if len(advantages) == len(inputs.rewards_B):
            advantages = advantages.repeat_interleave(inputs.lengths_B)
        return advantages - _distance(inputs)

    def row_advantages(self, rewards_B: Tensor, groups_B: Tensor) -> Tensor:
        if self.config.reward_coef == 0:
            return torch.zeros_like(rewards_B)
        return self.config.reward_coef * super().row_advantages(rewards_B, groups_B)

    def credit_metrics(self, inputs: CreditInputs) -> Mapping[str, Tensor]:
        return {**super().credit_metrics(inputs), "teacher/kl": _distance(inputs)}


def _distance(inputs: CreditInputs) -> Tensor:
    """Return the estimate of KL(generator || teacher) at each response token [R], whose mean over samples is exact."""
    return inputs.columns.values("rollout_logprobs") - inputs.columns.values("teacher_logprobs")
