"""Settings of the algorithms whose advantages come from a critic's values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt, Interval

from spmdrl.algorithms.settings.algo_config import ClippedConfig, Deviation, KlEstimator


@dataclass(frozen=True)
class ActorCriticConfig(ClippedConfig):
    """Advantages from the values of a critic, whose section has gamma and lambda."""

    kl_in: Literal["loss", "reward"] = "reward"
    """place of the KL term; reward: it lowers each token's reward (arXiv:1909.08593); loss: it is added to each token's
    loss"""
    kl_estimator: KlEstimator = "k1"
    """estimator of the KL divergence (Schulman 2020, "Approximating KL Divergence"); k1 can't be used in the loss"""
    kl_target: Annotated[float, Gt(0)] | None = None
    """target of the KL divergence from the reference, in nats per response; kl_coef is adapted towards it after each
    step (arXiv:1909.08593, section 2.2); null: kl_coef stays"""
    kl_gain: Annotated[float, Interval(gt=0, le=1)] = 0.1
    """gain of the adaptation: kl_coef changes by at most a fifth of this per step; verl's and TRL's horizon h is a gain
    of responses per step / h"""
    std: Deviation = "unbiased"
    """divisor of the standard deviation of n values: n - 1 (unbiased; verl) or n (biased; OpenRLHF)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_target is None and self.kl_gain != type(self).kl_gain:
            raise ValueError(
                f"algo.kl_gain is {self.kl_gain}, but without algo.kl_target nothing is adapted; set algo.kl_target, "
                "or leave algo.kl_gain out"
            )
        if self.kl_target is not None and not self.kl_in_credit:
            raise ValueError(
                f"algo.kl_target is {self.kl_target}, but algo.kl_coef is {self.kl_coef} and algo.kl_in {self.kl_in}: "
                "only a coefficient above 0 of the KL term in the reward is adapted; set algo.kl_coef to its first "
                "value and algo.kl_in to reward, or leave algo.kl_target out"
            )


@dataclass(frozen=True)
class PpoConfig(ActorCriticConfig):
    """Generalized advantages from a critic's values (arXiv:1707.06347, arXiv:1506.02438)."""

    name: Literal["ppo"] = "ppo"
    """the algorithm"""


FilterRule = Literal["best-random", "best-worst", "power"]


@dataclass(frozen=True)
class PfPpoConfig(ActorCriticConfig):
    """PPO on rows that are drawn, with replacement, by their rewards (arXiv:2409.06957)."""

    name: Literal["pf_ppo"] = "pf_ppo"
    """the algorithm"""
    filter: FilterRule = "best-random"
    """probability of drawing a response; best-random: the best one's is four times each other's; best-worst: only the
    best and the worst, equally likely; power: by |reward| to the power of filter_power"""
    filter_power: Annotated[float, Gt(0)] = 2.0
    """the exponent of filter power"""
    filter_scope: Literal["prompt", "batch"] = "prompt"
    """pool that a response is compared with and drawn from; prompt: the responses to its prompt, by which the authors
    weigh too, though they draw from the whole buffer; batch: all responses of the step (verl)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.filter != "power" and self.filter_power != PfPpoConfig.filter_power:
            raise ValueError(
                f"algo.filter_power is {self.filter_power}, but algo.filter {self.filter} has no power; set "
                "algo.filter to power, or leave algo.filter_power out"
            )
