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
    """weight of the KL divergence from the reference model; 0: no reference model is loaded"""
    kl_in: Literal["loss", "reward", "advantage"] = "loss"
    """loss: the KL term is added to each token's loss; reward: its sum over a row is subtracted from the reward before
    advantages are computed; advantage: its sum over a token and all later ones is subtracted from the token's
    advantage"""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """estimator of the KL divergence (Schulman 2020, "Approximating KL Divergence"); k1 can't be used in the loss"""
    clip_ratio_low: Annotated[float, Interval(ge=0, lt=1)] = 0.2
    """the probability ratio is clipped below at 1 - this"""
    clip_ratio_high: Annotated[float, Ge(0)] = 0.2
    """the probability ratio is clipped above at 1 + this; more than clip_ratio_low is DAPO's clip-higher"""
    loss_agg: LossAggregation = "token-mean"
    """how token losses become one number; token-mean: mean over all tokens; seq-mean-...: mean over rows of a row's
    mean (token-mean), sum (token-sum), or sum / rollout.max_completion_length (token-sum-norm, Dr. GRPO)"""
    rollout_is: RolloutIs = "none"
    """how tokens are weighted by trainer's / generator's probability; tis: capped at C; icepop: tokens outside [alpha,
    beta] dropped; seq-mask-tis: rows whose geometric mean lies outside [alpha, beta] dropped, the others' tokens capped
    at C"""
    rollout_is_clip: float | tuple[float, ...] | None = None
    """C of tis, [alpha, beta] of icepop or [alpha, beta, C] of seq-mask-tis; null: 2.0, [0.5, 5.0] or [0.5, 5.0,
    2.0]"""

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
