"""What an algorithm is: the columns it reads, how it credits rewards, and its loss.

Shape letters: `B` rows, `R` response tokens of those rows, packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from spmdrl.algorithms.correction import CorrectionRule, RolloutIs, correction_rule
from spmdrl.types import CreditInputs, LossScope, TokenLoss, TokenTerms


@dataclass(frozen=True)
class AlgoConfig:
    """What to learn from the rewards."""

    name: Literal["grpo"] = "grpo"
    """the algorithm"""
    kl_coef: float = 0.0
    """weight of the KL divergence from the reference model; 0 loads no reference model"""
    kl_in: Literal["loss", "reward"] = "loss"
    """whether the KL term is added to the loss of each token or taken off the reward of each row"""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """which estimator of the KL divergence (Schulman 2020, "Approximating KL Divergence"); k1 only in the reward"""
    clip_ratio_low: float = 0.2
    """the probability ratio is clipped below at 1 - this"""
    clip_ratio_high: float = 0.2
    """the probability ratio is clipped above at 1 + this; more than clip_ratio_low is DAPO's clip-higher"""
    clip_ratio_c: float | None = None
    """dual clip: for negative advantages the loss is at most this times -advantage; null turns it off"""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """whose standard deviation divides the centred rewards"""
    ratio_level: Literal["token", "sequence"] = "token"
    """one probability ratio a token, or the geometric mean over a row's tokens (GSPO)"""
    loss_agg: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "token-mean"
    """how token losses become one number"""
    rollout_is: RolloutIs = "none"
    """how tokens are weighted by trainer's / generator's probability: tis caps it at C; icepop drops tokens outside
    [alpha, beta]; seq-mask-tis drops rows whose geometric mean lies outside [alpha, beta], and caps the others at C"""
    rollout_is_clip: float | tuple[float, ...] | None = None
    """C of tis (null: 2.0), [alpha, beta] of icepop (0.5, 5.0) or [alpha, beta, C] of seq-mask-tis (0.5, 5.0, 2.0)"""

    def __post_init__(self) -> None:
        if self.kl_coef < 0:
            raise ValueError(f"algo.kl_coef is {self.kl_coef}, but it must be >= 0; 0 turns the KL term off")
        if self.kl_coef > 0 and self.kl_in == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                f"algo.kl_in is loss and algo.kl_estimator is k1 (algo.kl_coef {self.kl_coef}), but k1's gradient is "
                "that of the log-prob alone, whose expectation is 0: nothing would be pulled back to the reference; "
                "set algo.kl_estimator to k3 or k2, or algo.kl_in to reward"
            )
        if not 0 <= self.clip_ratio_low < 1:
            raise ValueError(f"algo.clip_ratio_low is {self.clip_ratio_low}, but must be in [0, 1); 0.2 is usual")
        if self.clip_ratio_high < 0:
            raise ValueError(f"algo.clip_ratio_high is {self.clip_ratio_high}, but must be >= 0; 0.2 is usual")
        if self.clip_ratio_c is not None and self.clip_ratio_c <= 1:
            raise ValueError(f"algo.clip_ratio_c is {self.clip_ratio_c}, but must be > 1 (3 is usual), or null for off")
        correction_rule(self.rollout_is, self.rollout_is_clip)

    @property
    def correction(self) -> CorrectionRule | None:
        """What `rollout_is` and `rollout_is_clip` say."""
        return correction_rule(self.rollout_is, self.rollout_is_clip)


class Algorithm(Protocol):
    """Pure functions over tensors; the set of stages follows from the columns they read."""

    def columns_for_credit(self) -> frozenset[str]:
        """Columns that `advantages` needs beside the reward."""
        ...

    def columns_for_loss(self, num_updates: int) -> frozenset[str]:
        """Columns that `loss` needs when a batch is used for `num_updates` optimizer steps."""
        ...

    def needs_signal(self) -> bool:
        """Whether a row whose advantage is 0 has no gradient, so that an update may leave it out."""
        ...

    def token_kl(self, logprobs_R: Tensor, ref_logprobs_R: Tensor) -> Tensor:
        """The estimate of KL(policy || reference) at each response token [R]."""
        ...

    def advantages(self, inputs: CreditInputs) -> Tensor:
        """One advantage a row [B]; NaN where the row can't be trained on."""
        ...

    def loss(self, terms: TokenTerms) -> TokenLoss: ...

    def token_weights(self, lengths_B: Tensor, scope: LossScope) -> Tensor:
        """The weight of each response token [R], so that the weighted sum over all ranks is the loss."""
        ...
