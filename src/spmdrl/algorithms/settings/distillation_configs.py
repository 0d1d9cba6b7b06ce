"""Settings of the algorithms that learn from a teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Interval

from spmdrl.algorithms.settings.algo_config import AlgoConfig, ClippedConfig, GroupRelativeConfig


@dataclass(frozen=True)
class OpdConfig(GroupRelativeConfig, ClippedConfig):
    """Each token's log-prob under a teacher, less that under the generator, as its advantage (arXiv:2306.13649)."""

    name: Literal["opd"] = "opd"
    """the algorithm"""
    kl_in: Literal["loss", "advantage"] = "loss"
    """place of the KL term to the reference model; loss: it is added to each token's loss; advantage: its sum over a
    token and all later ones is subtracted from the token's advantage"""
    reward_coef: Annotated[float, Ge(0)] = 0.0
    """weight of the reward's group-relative advantage, added to the teacher's; 0: the teacher alone, and rewards are
    only reported"""


Divergence = Literal["forward", "reverse", "jsd"]


@dataclass(frozen=True)
class GkdConfig(AlgoConfig):
    """A divergence between the distributions of a teacher and the policy, as the loss (arXiv:2306.13649)."""

    name: Literal["gkd"] = "gkd"
    """the algorithm"""
    kl_in: Literal["loss"] = "loss"
    """place of the KL term to the reference model: it is added to each token's loss"""
    top_k: Annotated[int, Ge(1)] = 32
    """number of the teacher's likeliest tokens compared in each token's place; all others are compared as one"""
    divergence: Divergence = "jsd"
    """divergence from the teacher; forward: KL(teacher || policy), mode-covering; reverse: KL(policy || teacher),
    mode-seeking; jsd: between both, by beta"""
    beta: Annotated[float, Interval(gt=0, lt=1)] = 0.5
    """the teacher's share of jsd's mixture; near 0 the gradient is forward's, near 1 reverse's"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta != 0.5 and self.divergence != "jsd":
            raise ValueError(
                f"algo.beta is {self.beta}, but algo.divergence {self.divergence} has no mixture; set "
                "algo.divergence to jsd, or leave algo.beta out"
            )
        if self.off_policy_bound is not None:
            raise ValueError(
                f"algo.off_policy_bound is {self.off_policy_bound}, but it leaves out rows with negative advantages, "
                "of which gkd has none; leave it out"
            )
