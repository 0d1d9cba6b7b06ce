"""Generalized knowledge distillation on the policy's own responses (arXiv:2306.13649, Eq. 1 and 2).

q, p = teacher's and policy's probabilities of the teacher's top_k tokens, and of any other token (the tail)
L = KL(q || p) (forward), KL(p || q) (reverse), or
L = beta KL(q || m) + (1 - beta) KL(p || m) with m = beta q + (1 - beta) p (jsd)

The tail makes q and p distributions, so that L is a divergence: never negative, 0 only where they are equal, and at
most the divergence over the whole vocabulary, which it equals if top_k is the vocabulary's size.

Shape letters: `R` response tokens, packed; `J` tokens compared in place of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.algorithms.algorithm import Algorithm
from spmdrl.algorithms.settings.distillation_configs import Divergence, GkdConfig
from spmdrl.nouns.batch import CreditInputs, TokenLoss, TokenTerms


@dataclass(frozen=True)
class Gkd(Algorithm):
    """Divergence from the teacher as the loss of each token; rewards are only reported."""

    config: GkdConfig

    @property
    def num_likeliest(self) -> int:
        return self.config.top_k

    def columns_for_loss(self, num_updates: int) -> frozenset[str]:
        # Without ratios only corrections compare with the policy that the step began with.
        columns = super().columns_for_loss(num_updates if self.config.weighs_by_old else 1)
        return columns | {"teacher_top_ids", "teacher_top_logprobs"}

    def needs_signal(self) -> bool:
        return False

    def select(self, inputs: CreditInputs) -> Mapping[str, Tensor]:
        return {}

    def advantages(self, inputs: CreditInputs) -> Tensor:
        """Return 1 for all rows, so that each is trained on equally."""
        return torch.ones_like(inputs.rewards_B)

    def policy_loss(self, terms: TokenTerms, old_logprobs_R: Tensor) -> TokenLoss:
        assert terms.others_RJ is not None, "the update rates the teacher's likeliest tokens"
        teacher_RJ = terms.columns["teacher_top_logprobs"]
        loss_R = divergence(teacher_RJ, terms.others_RJ, self.config.divergence, self.config.beta)
        return TokenLoss(loss_R, {"teacher/divergence": loss_R})


def divergence(teacher_RJ: Tensor, policy_RJ: Tensor, kind: Divergence, beta: float) -> Tensor:
    """Compute the divergence of two distributions [R] from their log-probs, with the gradient of a divergence."""
    if kind == "forward":
        return _kl(teacher_RJ, policy_RJ)
    to_RJ = teacher_RJ
    if kind == "jsd":
        shares = torch.tensor([beta, 1 - beta], dtype=torch.float64).log().tolist()
        to_RJ = torch.logaddexp(teacher_RJ + shares[0], policy_RJ + shares[1]).detach()
    # log p and the mixture add the gradient of a sum of probabilities, which is 1: only rounding errors, in which the
    # gradient of a small divergence would be lost.
    reverse_R = (policy_RJ.exp() * (policy_RJ - to_RJ).detach()).sum(-1)
    return reverse_R if kind == "reverse" else beta * _kl(teacher_RJ, to_RJ) + (1 - beta) * reverse_R


def _kl(of_RJ: Tensor, to_RJ: Tensor) -> Tensor:
    return (of_RJ.exp() * (of_RJ - to_RJ)).sum(-1)
