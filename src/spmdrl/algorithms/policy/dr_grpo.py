"""Dr. GRPO: GRPO without what favours short right and long wrong responses (arXiv:2503.20783, Eq. 3).

A = R - mean of the group
L = -min(r A, clip(r, 1 - low, 1 + high) A), summed over a row and divided by a constant, the longest response
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spmdrl.algorithms.policy.grpo import GrpoSettings
from spmdrl.algorithms.terms.losses import LossAggregation


@dataclass(frozen=True)
class DrGrpoConfig(GrpoSettings):
    """GRPO without divisions by standard deviation and by length (arXiv:2503.20783)."""

    name: Literal["dr_grpo"] = "dr_grpo"
    """the algorithm"""
    scale_rewards: Literal["group", "batch", "none"] = "none"
    """rewards minus their group's mean aren't divided; group, batch: by the standard deviation of the group or of the
    batch, as GRPO does"""
    loss_agg: LossAggregation = "seq-mean-token-sum-norm"
    """how token losses become one number; the paper's is seq-mean-token-sum-norm: mean over rows of a row's sum over
    rollout.max_completion_length"""
