"""Settings that all algorithms share, and of parts that several have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Interval

KlEstimator = Literal["k1", "k2", "k3"]
KlGradient = Literal["plain", "importance", "straight_through"]
LossAggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
# Keeps nearly equal rewards from being blown up; far below any reward difference that matters.
EPSILON = 1e-4
Deviation = Literal["unbiased", "biased"]
Rule = Literal["importance", "tis", "icepop", "seq-mask-tis"]
RolloutIs = Literal["none", "importance", "tis", "icepop", "seq-mask-tis"]
SequenceRatio = Literal["mean", "sum"]
# Default bounds of each rule; rollout_is_clip replaces all of them.
DEFAULT_CLIPS: Mapping[str, tuple[float, ...]] = {
    "importance": (),
    "tis": (2.0,),
    "icepop": (0.5, 5.0),
    "seq-mask-tis": (0.5, 5.0, 2.0),
}
CLIP_NAMES: Mapping[str, str] = {"tis": "C", "icepop": "[alpha, beta]", "seq-mask-tis": "[alpha, beta, C]"}


def correction_bounds(kind: Rule, clip: float | tuple[float, ...] | None) -> tuple[float, ...]:
    """Return the bounds of the rule that `algo.rollout_is` names. Raises ValueError if `algo.rollout_is_clip` doesn't
    fit it."""
    default = DEFAULT_CLIPS[kind]
    bounds = default if clip is None else clip if isinstance(clip, tuple) else (clip,)
    if len(bounds) != len(default) or any(bound < 0 for bound in bounds) or bounds[-1:] == (0,):
        raise _wrong_clip(kind, clip)
    if len(bounds) > 1 and bounds[0] >= bounds[1]:
        raise _wrong_clip(kind, clip)
    return bounds


def _wrong_clip(kind: str, clip: float | tuple[float, ...] | None) -> ValueError:
    default = ", ".join(map(str, DEFAULT_CLIPS[kind]))
    rule = f"{CLIP_NAMES[kind]} with 0 <= alpha < beta and 0 < C; leave it out for the usual {default}"
    takes = rule if default else "no bound; leave it out, or set algo.rollout_is to tis"
    return ValueError(f"algo.rollout_is_clip is {clip}, but algo.rollout_is {kind} takes {takes}")


@dataclass(frozen=True)
class ClipRange:
    """The trust region of the probability ratio; `dual` bounds the loss of negative advantages."""

    low: float
    high: float
    dual: float | None = None


@dataclass(frozen=True)
class AlgoConfig:
    """Settings of every algorithm; each adds its own in a subclass."""

    name: str
    """the algorithm"""
    kl_coef: Annotated[float, Ge(0)] = 0.0
    """weight of the KL divergence from the reference model; 0: no reference model is loaded"""
    kl_in: Literal["loss", "reward", "advantage"] = "loss"
    """place of the KL term; loss: it is added to each token's loss; reward: its sum over a row is subtracted from the
    reward before advantages are computed; advantage: its sum over a token and all later ones is subtracted from the
    token's advantage"""
    kl_estimator: KlEstimator = "k3"
    """estimator of the KL divergence (Schulman 2020, "Approximating KL Divergence"); k1 can't be used in the loss"""
    kl_gradient: KlGradient = "plain"
    """gradient of the KL term in the loss; plain: its own, for fixed tokens (the GRPO paper); importance: weighted by
    the probability ratio to the policy that the step began with, which is exact for the policy being trained
    (DeepSeek-V3.2, TRL); straight_through: the estimate's value with the gradient of k2 (verl's k1+ and k3+)"""
    entropy_coef: float = 0.0
    """weight of the policy's entropy, subtracted from each token's loss: above 0 a bonus"""
    loss_agg: LossAggregation = "token-mean"
    """reduction of token losses to one number; token-mean: mean over all tokens; seq-mean-...: mean over rows of a
    row's mean (token-mean), sum (token-sum), or sum / rollout.max_completion_length (token-sum-norm, Dr. GRPO)"""
    rollout_is: RolloutIs = "none"
    """weight of tokens by the ratio of trainer's to generator's probability; importance: the ratio; tis: capped at C;
    icepop: tokens outside [alpha, beta] dropped; seq-mask-tis: rows outside [alpha, beta] dropped, the others' tokens
    capped at C; with rollout.lag above 0 the default is tis"""
    rollout_is_clip: float | tuple[float, ...] | None = None
    """C of tis, [alpha, beta] of icepop or [alpha, beta, C] of seq-mask-tis; null: 2.0, [0.5, 5.0] or [0.5, 5.0,
    2.0]"""
    rollout_is_sequence: Literal["mean", "sum"] = "mean"
    """row ratio that seq-mask-tis compares with its bounds; mean: the geometric mean of a row's ratios (OpenRLHF); sum:
    their product (TRL), which leaves the bounds sooner the longer a row is"""
    off_policy_bound: Annotated[float, Gt(0)] | None = None
    """bound in nats on a row's mean log(generator's / present policy's probability), above which rows with a negative
    advantage leave the loss (off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556, Eq. 9); null: none"""

    def __post_init__(self) -> None:
        if self.kl_in_loss and self.kl_estimator == "k1" and self.kl_gradient == "plain":
            raise ValueError(
                f"algo.kl_in is loss and algo.kl_estimator is k1 (algo.kl_coef {self.kl_coef}), but k1's gradient is "
                "that of the log-prob alone, whose expectation is 0: nothing would be pulled back to the reference; "
                "set algo.kl_estimator to k3 or k2, algo.kl_in to reward, or algo.kl_gradient to importance"
            )
        if self.kl_in_credit and self.kl_gradient != "plain":
            raise ValueError(
                f"algo.kl_gradient is {self.kl_gradient}, but algo.kl_in is {self.kl_in}, where the KL term has no "
                "gradient; leave algo.kl_gradient out, or set algo.kl_in to loss"
            )
        if self.rollout_is != "none":
            correction_bounds(self.rollout_is, self.rollout_is_clip)
        elif self.rollout_is_clip is not None:
            raise ValueError(
                f"algo.rollout_is_clip is {self.rollout_is_clip}, but algo.rollout_is is none, which bounds nothing; "
                f"name a rule ({', '.join(DEFAULT_CLIPS)}) or leave algo.rollout_is_clip out"
            )
        if self.rollout_is_sequence != "mean" and self.rollout_is != "seq-mask-tis":
            raise ValueError(
                f"algo.rollout_is_sequence is {self.rollout_is_sequence}, but algo.rollout_is {self.rollout_is} looks "
                "at tokens alone; set algo.rollout_is to seq-mask-tis, or leave algo.rollout_is_sequence out"
            )

    @property
    def changed(self) -> dict[str, tuple[object, object]]:
        """Keys that differ from the algorithm's defaults (its paper's): the value and the default."""
        values = {entry.name: (getattr(self, entry.name), entry.default) for entry in fields(self)}
        return {name: (value, default) for name, (value, default) in values.items() if value != default}

    @property
    def weighs_by_old(self) -> bool:
        """True if a token's loss is weighted against the policy that the step began with."""
        return self.rollout_is != "none" or (self.kl_in_loss and self.kl_gradient == "importance")

    @property
    def kl_in_loss(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "loss"

    @property
    def kl_in_credit(self) -> bool:
        """True if the KL term lowers rewards or advantages."""
        return self.kl_coef > 0 and self.kl_in != "loss"


@dataclass(frozen=True)
class ClippedConfig(AlgoConfig):
    """Settings of PPO's clip."""

    clip_ratio_low: Annotated[float, Interval(ge=0, lt=1)] = 0.2
    """lower clip of the probability ratio, at 1 - this"""
    clip_ratio_high: Annotated[float, Ge(0)] = 0.2
    """upper clip of the probability ratio, at 1 + this; more than clip_ratio_low is DAPO's clip-higher"""
    clip_ratio_c: Annotated[float, Gt(1)] | None = None
    """dual clip: bound on the loss of negative advantages, at this times -advantage; null: off"""

    @property
    def clip(self) -> ClipRange:
        return ClipRange(self.clip_ratio_low, self.clip_ratio_high, self.clip_ratio_c)


@dataclass(frozen=True)
class GroupRelativeConfig(AlgoConfig):
    """Comparison of rewards with those of the same prompt."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """divisor of rewards minus their group's mean; group, batch: the standard deviation of the group or of the batch;
    none: not divided"""
    std: Deviation = "unbiased"
    """divisor of the standard deviation of n rewards: n - 1 (unbiased) or n (biased); papers leave it open"""
    std_epsilon: Annotated[float, Ge(0)] = EPSILON
    """value added to the standard deviation; 1e-4 as in TRL, verl has 1e-6, OpenRLHF 1e-9"""
