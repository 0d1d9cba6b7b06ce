"""GSPO: one probability ratio per response, the geometric mean over its tokens (arXiv:2507.18071, Eq. 5 to 7).

A = (R - mean of the group) / standard deviation of the group
s = exp(mean over the row of log(p / p_old))
L = -min(s A, clip(s, 1 - low, 1 + high) A), a mean over rows
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Interval

from spmdrl.algorithms.policy.grpo import GrpoSettings
from spmdrl.algorithms.terms.losses import LossAggregation


@dataclass(frozen=True)
class GspoConfig(GrpoSettings):
    """GRPO with a ratio per response (arXiv:2507.18071)."""

    name: Literal["gspo"] = "gspo"
    """the algorithm"""
    clip_ratio_low: Annotated[float, Interval(ge=0, lt=1)] = 3e-4
    """a response's ratio is clipped below at 1 - this; means over many tokens lie close to 1"""
    clip_ratio_high: Annotated[float, Ge(0)] = 4e-4
    """a response's ratio is clipped above at 1 + this"""
    ratio_level: Literal["token", "sequence"] = "sequence"
    """sequence: the geometric mean of the tokens' ratios over a row; token: one ratio per token, as in GRPO"""
    loss_agg: LossAggregation = "seq-mean-token-mean"
    """how token losses become one number; the paper's is seq-mean-token-mean, the mean over rows of a row's mean;
    verl's default is token-mean"""
