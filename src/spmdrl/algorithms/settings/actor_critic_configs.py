"""Settings of the algorithms whose advantages are made of a critic's values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt, Interval

from spmdrl.algorithms.settings.algo_config import ClippedConfig, Deviation, KlEstimator


@dataclass(frozen=True)
class ActorCriticConfig(ClippedConfig):
    """Advantages from the values of a critic, whose section has gamma and lambda."""

    kl_in: Literal["loss", "reward"] = "reward"
    """reward: each token's reward is lowered by its KL term (arXiv:1909.08593); loss: it is added to each token's
    loss"""
    kl_estimator: KlEstimator = "k1"
    """estimator of the KL divergence (Schulman 2020, "Approximating KL Divergence"); k1 can't be used in the loss"""
    kl_target: Annotated[float, Gt(0)] | None = None
    """KL divergence from the reference, in nats per response, that kl_coef is raised or lowered towards after each step
    (arXiv:1909.08593, section 2.2); null: kl_coef stays"""
    kl_gain: Annotated[float, Interval(gt=0, le=1)] = 0.1
    """the most that kl_coef changes in a step is a fifth of this, as a share; verl's and TRL's horizon h is a gain of
    responses per step / h"""
    std: Deviation = "unbiased"
    """the standard deviation of n values divides by n - 1 (unbiased; verl) or n (biased; OpenRLHF)"""

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
                "what is adapted is a coefficient above 0 of the KL term in the reward; set algo.kl_coef to the one to "
                "begin with and algo.kl_in to reward, or leave algo.kl_target out"
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
    """how likely a response is drawn; best-random: the best one four times as likely as each other; best-worst: the
    best and the worst alike, no other; power: by |reward| to the power of filter_power"""
    filter_power: Annotated[float, Gt(0)] = 2.0
    """the exponent of filter power"""
    filter_scope: Literal["prompt", "batch"] = "prompt"
    """what a response is compared with and drawn from, as many as there are; prompt: the other responses to its prompt,
    by which the authors weigh too, though they draw from the whole buffer; batch: all responses of the step (verl)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.filter != "power" and self.filter_power != PfPpoConfig.filter_power:
            raise ValueError(
                f"algo.filter_power is {self.filter_power}, but algo.filter {self.filter} has no power; set "
                "algo.filter to power, or leave algo.filter_power out"
            )
