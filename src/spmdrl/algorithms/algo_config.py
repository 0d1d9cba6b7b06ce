"""The settings that all algorithms share; each algorithm adds its own in a subclass beside its functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Interval

from spmdrl.algorithms.correction import CorrectionRule, RolloutIs, correction_rule
from spmdrl.algorithms.losses import LossAggregation


@dataclass(frozen=True)
class AlgoConfig:
    """What to learn from the rewards."""

    name: str
    """the algorithm"""
    kl_coef: Annotated[float, Ge(0)] = 0.0
    """weight of the KL divergence from the reference model; 0 loads no reference model"""
    kl_in: Literal["loss", "reward", "advantage"] = "loss"
    """loss: the KL term is added to the loss of each token; reward: a row's sum is taken off its reward, before
    advantages are made; advantage: the sum over a token and all later ones is taken off the token's advantage"""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """which estimator of the KL divergence (Schulman 2020, "Approximating KL Divergence"); k1 not in the loss"""
    clip_ratio_low: Annotated[float, Interval(ge=0, lt=1)] = 0.2
    """the probability ratio is clipped below at 1 - this"""
    clip_ratio_high: Annotated[float, Ge(0)] = 0.2
    """the probability ratio is clipped above at 1 + this; more than clip_ratio_low is DAPO's clip-higher"""
    loss_agg: LossAggregation = "token-mean"
    """how token losses become one number: token-mean: their mean; seq-mean-...: the mean over rows of a row's mean, of
    its sum, or of its sum over rollout.max_completion_length (sum-norm, Dr. GRPO)"""
    rollout_is: RolloutIs = "none"
    """how tokens are weighted by trainer's / generator's probability: tis caps it at C; icepop drops tokens outside
    [alpha, beta]; seq-mask-tis drops rows whose geometric mean lies outside [alpha, beta], and caps the others at C"""
    rollout_is_clip: float | tuple[float, ...] | None = None
    """C of tis (null: 2.0), [alpha, beta] of icepop (0.5, 5.0) or [alpha, beta, C] of seq-mask-tis (0.5, 5.0, 2.0)"""

    def __post_init__(self) -> None:
        if self.kl_coef > 0 and self.kl_in == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                f"algo.kl_in is loss and algo.kl_estimator is k1 (algo.kl_coef {self.kl_coef}), but k1's gradient is "
                "that of the log-prob alone, whose expectation is 0: nothing would be pulled back to the reference; "
                "set algo.kl_estimator to k3 or k2, or algo.kl_in to reward"
            )
        correction_rule(self.rollout_is, self.rollout_is_clip)

    @property
    def correction(self) -> CorrectionRule | None:
        """The rule that `rollout_is` and `rollout_is_clip` name."""
        return correction_rule(self.rollout_is, self.rollout_is_clip)

    @property
    def kl_in_loss(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "loss"

    @property
    def kl_in_credit(self) -> bool:
        """Whether the KL term lowers rewards or advantages."""
        return self.kl_coef > 0 and self.kl_in != "loss"
