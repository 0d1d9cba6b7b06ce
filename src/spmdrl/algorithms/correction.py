"""Weights for tokens that another policy drew than the one that learns from them.

A response is drawn by the generation engine, perhaps with weights of earlier steps; the update takes its tokens as if
the trainer had drawn them with the weights that the step began with. The ratio of the two probabilities says how far
that is from the truth, and each rule here makes a weight of it that multiplies the token's policy loss, and that no
gradient flows through. Tokens that a rule drops still count in the mean that the loss is.

Shape letters: `R` response tokens, packed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from spmdrl.algorithms.losses import sequence_log_ratio
from spmdrl.algorithms.ratios import bounded_exp

RolloutIs = Literal["none", "tis", "icepop", "seq-mask-tis"]

# How many numbers each rule is given, and what they are unless told.
DEFAULT_CLIPS: Mapping[str, tuple[float, ...]] = {
    "tis": (2.0,),
    "icepop": (0.5, 5.0),
    "seq-mask-tis": (0.5, 5.0, 2.0),
}
CLIP_NAMES: Mapping[str, str] = {
    "tis": "C",
    "icepop": "[alpha, beta]",
    "seq-mask-tis": "[alpha, beta, C]",
}


@dataclass(frozen=True)
class Correction:
    """What a rule makes of each token's ratio; all [R], without gradient."""

    weights_R: Tensor
    ratio_R: Tensor
    clipped_R: Tensor
    """1.0 where the weight is the ratio's upper bound instead of the ratio"""
    masked_R: Tensor
    """1.0 where the token is dropped"""

    @property
    def metrics(self) -> dict[str, Tensor]:
        return {
            "rollout_is/ratio_mean": self.ratio_R,
            "rollout_is/clipped_share": self.clipped_R,
            "rollout_is/masked_share": self.masked_R,
        }


@dataclass(frozen=True)
class CorrectionRule:
    """One way from ratios to weights, with its bounds."""

    kind: Literal["tis", "icepop", "seq-mask-tis"]
    clip: tuple[float, ...]

    def __call__(self, log_ratio_R: Tensor, row_of_token_R: Tensor, num_rows: int) -> Correction:
        """The weights, of log(trainer's probability / generator's probability) at each token."""
        log_ratio_R = log_ratio_R.detach()
        if self.kind == "tis":
            return truncated(log_ratio_R, *self.clip)
        if self.kind == "icepop":
            return masked_by_token(log_ratio_R, *self.clip)
        low, high, cap = self.clip
        sequence_R = sequence_log_ratio(log_ratio_R, row_of_token_R, num_rows)
        return masked_by_sequence(log_ratio_R, sequence_R, low=low, high=high, cap=cap)


def correction_rule(kind: RolloutIs, clip: float | tuple[float, ...] | None) -> CorrectionRule | None:
    """The rule that `algo.rollout_is` and `algo.rollout_is_clip` name; raises ValueError where they don't fit."""
    if kind == "none":
        if clip is not None:
            raise ValueError(
                f"algo.rollout_is_clip is {clip}, but algo.rollout_is is none, which bounds nothing; name a rule "
                f"({', '.join(DEFAULT_CLIPS)}) or leave algo.rollout_is_clip out"
            )
        return None
    default = DEFAULT_CLIPS[kind]
    bounds = default if clip is None else clip if isinstance(clip, tuple) else (clip,)
    if len(bounds) != len(default) or any(bound < 0 for bound in bounds) or bounds[-1] == 0:
        raise _wrong_clip(kind, clip)
    if len(bounds) > 1 and bounds[0] >= bounds[1]:
        raise _wrong_clip(kind, clip)
    return CorrectionRule(kind, bounds)


def truncated(log_ratio_R: Tensor, cap: float) -> Correction:
    """min(ratio, C): truncated importance sampling (Ionides 2008, "Truncated Importance Sampling").

    For rollouts: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training".
    """
    ratio_R = bounded_exp(log_ratio_R)
    return Correction(ratio_R.clamp(max=cap), ratio_R, (ratio_R > cap).to(ratio_R), torch.zeros_like(ratio_R))


def masked_by_token(log_ratio_R: Tensor, low: float, high: float) -> Correction:
    """The ratio where it lies in [alpha, beta], else 0: IcePop (arXiv:2510.18855; arXiv:2512.16144, Eq. 1)."""
    ratio_R = bounded_exp(log_ratio_R)
    kept_R = (ratio_R >= low) & (ratio_R <= high)
    return Correction(ratio_R.where(kept_R, 0.0), ratio_R, torch.zeros_like(ratio_R), (~kept_R).to(ratio_R))


def masked_by_sequence(
    log_ratio_R: Tensor, sequence_log_ratio_R: Tensor, *, low: float, high: float, cap: float
) -> Correction:
    """min(ratio, C) in rows whose ratios have a geometric mean in [alpha, beta], 0 in the others.

    A product over the row would drop long rows for being long, a mean doesn't (Li et al. 2025, "When Speed Kills
    Stability", part 3, Geometric Sequence Masking).
    """
    sequence_R = bounded_exp(sequence_log_ratio_R)
    kept_R = (sequence_R >= low) & (sequence_R <= high)
    tokens = truncated(log_ratio_R, cap)
    weights_R, clipped_R = tokens.weights_R.where(kept_R, 0.0), tokens.clipped_R.where(kept_R, 0.0)
    return Correction(weights_R, tokens.ratio_R, clipped_R, (~kept_R).to(tokens.ratio_R))


def _wrong_clip(kind: str, clip: float | tuple[float, ...] | None) -> ValueError:
    default = ", ".join(map(str, DEFAULT_CLIPS[kind]))
    return ValueError(
        f"algo.rollout_is_clip is {clip}, but algo.rollout_is {kind} takes {CLIP_NAMES[kind]} with 0 <= alpha < beta "
        f"and 0 < C; leave it out for the usual {default}"
    )
