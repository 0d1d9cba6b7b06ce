"""Settings of the algorithms that need no other trained model than the policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Interval

from spmdrl.algorithms.settings.algo_config import (
    ClippedConfig,
    Deviation,
    GroupRelativeConfig,
    KlEstimator,
    LossAggregation,
)


@dataclass(frozen=True)
class GrpoSettings(GroupRelativeConfig, ClippedConfig):
    """Settings of GRPO and of algorithms that differ from it by settings alone."""

    ratio_level: Literal["token", "sequence"] = "token"
    """level of the probability ratio; token: one per token; sequence: their geometric mean over a row (GSPO)"""


@dataclass(frozen=True)
class GrpoConfig(GrpoSettings):
    """Group-relative advantages and PPO's clipped loss (arXiv:2402.03300), in the form of TRL's and verl's defaults."""

    name: Literal["grpo"] = "grpo"
    """the algorithm"""


@dataclass(frozen=True)
class GrpoPaperConfig(GrpoSettings):
    """GRPO with the values of its paper (arXiv:2402.03300, section 4.2)."""

    name: Literal["grpo_paper"] = "grpo_paper"
    """the algorithm"""
    kl_coef: Annotated[float, Ge(0)] = 0.04
    """weight of the KL divergence from the reference model; 0: no reference model is loaded"""
    loss_agg: LossAggregation = "seq-mean-token-mean"
    """reduction of token losses to one number; the paper's is seq-mean-token-mean, the mean over rows of a row's
    mean"""


@dataclass(frozen=True)
class DrGrpoConfig(GrpoSettings):
    """GRPO without divisions by standard deviation and by length (arXiv:2503.20783).

    Dr. GRPO: GRPO without its bias to short right and long wrong responses (Eq. 3).

    A = R - mean of the group
    L = -min(r A, clip(r, 1 - low, 1 + high) A), summed over a row and divided by a constant, the longest response
    """

    name: Literal["dr_grpo"] = "dr_grpo"
    """the algorithm"""
    scale_rewards: Literal["group", "batch", "none"] = "none"
    """divisor of rewards minus their group's mean; none: not divided; group, batch: the standard deviation of the group
    or of the batch, as in GRPO"""
    loss_agg: LossAggregation = "seq-mean-token-sum-norm"
    """reduction of token losses to one number; the paper's is seq-mean-token-sum-norm: mean over rows of a row's sum
    over rollout.max_completion_length"""


@dataclass(frozen=True)
class DapoConfig(GrpoSettings):
    """GRPO that trains only on prompts with right and wrong responses (arXiv:2503.14476)."""

    name: Literal["dapo"] = "dapo"
    """the algorithm"""
    clip_ratio_high: Annotated[float, Ge(0)] = 0.28
    """upper clip of the probability ratio, at 1 + this; more than clip_ratio_low is DAPO's clip-higher"""
    overlong_cache: Annotated[int, Ge(0)] | None = None
    """length of the soft punishment: over these last tokens before rollout.max_completion_length a response's reward
    falls linearly by up to 1; null: a fifth of it, as the paper's 4096 of 20480; 0: none"""
    filter_on: str | None = None
    """reward function by whose values prompts are filtered, such as the one for the right answer; null: the reward
    itself, before the punishment for length"""
    max_refills: Annotated[int, Ge(0)] = 4
    """rounds in which a step generates more prompts in place of those left out, together at most as many as it trains;
    0: train on fewer"""


@dataclass(frozen=True)
class GspoConfig(GrpoSettings):
    """GRPO with a ratio per response (arXiv:2507.18071).

    GSPO: one probability ratio per response, the geometric mean over its tokens (Eq. 5 to 7).

    A = (R - mean of the group) / standard deviation of the group
    s = exp(mean over the row of log(p / p_old))
    L = -min(s A, clip(s, 1 - low, 1 + high) A), a mean over rows
    """

    name: Literal["gspo"] = "gspo"
    """the algorithm"""
    clip_ratio_low: Annotated[float, Interval(ge=0, lt=1)] = 3e-4
    """lower clip of a response's ratio, at 1 - this; means over many tokens lie close to 1"""
    clip_ratio_high: Annotated[float, Ge(0)] = 4e-4
    """upper clip of a response's ratio, at 1 + this"""
    ratio_level: Literal["token", "sequence"] = "sequence"
    """level of the probability ratio; sequence: the tokens' geometric mean over a row; token: one per token, as in
    GRPO"""
    loss_agg: LossAggregation = "seq-mean-token-mean"
    """reduction of token losses to one number; the paper's is seq-mean-token-mean, the mean over rows of a row's mean;
    verl's default is token-mean"""


@dataclass(frozen=True)
class GdpoConfig(GrpoSettings):
    """GRPO that compares each reward function's values separately (arXiv:2601.05242)."""

    name: Literal["gdpo"] = "gdpo"
    """the algorithm"""
    whiten_over: Literal["rows", "tokens"] = "rows"
    """values of the batch's standard deviation; rows: one per response, whose mean is 0; tokens: one per token, so that
    long responses count for more, with the mean subtracted too (verl)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_in_credit:
            raise ValueError(
                f"algo.kl_in is {self.kl_in} (algo.kl_coef {self.kl_coef}), but gdpo compares several rewards, none of "
                "which the KL term is part of; set algo.kl_in to loss"
            )


@dataclass(frozen=True)
class CispoConfig(GroupRelativeConfig):
    """Clipped importance weights (MiniMax-M1, arXiv:2506.13585)."""

    name: Literal["cispo"] = "cispo"
    """the algorithm"""
    is_min: Annotated[float, Ge(0)] = 0.0
    """lower bound of a token's importance weight, a ratio and not a distance from 1; 0: none (the paper)"""
    is_max: Annotated[float, Gt(0)] = 5.0
    """upper bound of a token's importance weight, a ratio and not a distance from 1; TRL's epsilon_high is the same"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_min >= self.is_max:
            raise ValueError(
                f"algo.is_min is {self.is_min} and algo.is_max {self.is_max}, but weights lie between them; both are "
                "ratios: set algo.is_min below algo.is_max, or to 0 for no lower bound"
            )


@dataclass(frozen=True)
class SapoConfig(GroupRelativeConfig):
    """A sigmoid of the probability ratio (arXiv:2511.20347)."""

    name: Literal["sapo"] = "sapo"
    """the algorithm"""
    tau_positive: Annotated[float, Gt(0)] = 1.0
    """steepness of the gate where the advantage is above 0"""
    tau_negative: Annotated[float, Gt(0)] = 1.05
    """steepness of the gate elsewhere; steeper, since a negative advantage raises many other tokens"""
    loss_agg: LossAggregation = "seq-mean-token-mean"
    """reduction of token losses to one number; the paper's is seq-mean-token-mean, the mean over rows of a row's
    mean"""


@dataclass(frozen=True)
class DppoConfig(GroupRelativeConfig):
    """A bound on the divergence, beyond which tokens are left out (arXiv:2602.04879)."""

    name: Literal["dppo"] = "dppo"
    """the algorithm"""
    divergence: Literal["tv", "kl"] = "tv"
    """divergence between the policies, each reduced to the token or any other; tv: total variation; kl: KL(anchor ||
    policy)"""
    divergence_bounds: tuple[Annotated[float, Gt(0)], Annotated[float, Gt(0)]] | None = None
    """bounds for tokens of negative advantage that became less likely, and of positive advantage that became more
    likely; null: the paper's 0.15 for tv, 0.05 for kl"""
    is_max: Annotated[float, Gt(1)] = 20.0
    """upper bound of a token's importance weight, a ratio"""
    anchor: Literal["rollout", "old"] = "rollout"
    """log-probs that the policy is compared with; rollout: the generator's (the paper); old: the trainer's at the
    beginning of the step (verl)"""
    scale_rewards: Literal["group", "batch", "none"] = "none"
    """divisor of rewards minus their group's mean; none: not divided; group, batch: the standard deviation of the group
    or of the batch, as in GRPO"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rollout_is != "none" and self.anchor == "rollout":
            raise ValueError(
                f"algo.rollout_is is {self.rollout_is}, but dppo's ratio is that to the generator already, which would "
                "count twice; leave algo.rollout_is out, or set algo.anchor to old"
            )

    @property
    def bounds(self) -> tuple[float, float]:
        """The lower and the upper bound."""
        return self.divergence_bounds or ((0.15, 0.15) if self.divergence == "tv" else (0.05, 0.05))


@dataclass(frozen=True)
class MaxRlConfig(ClippedConfig):
    """Centred rewards over their group's mean (arXiv:2602.02710)."""

    name: Literal["maxrl"] = "maxrl"
    """the algorithm"""


@dataclass(frozen=True)
class RlooConfig(ClippedConfig):
    """REINFORCE with a leave-one-out baseline (arXiv:2402.14740)."""

    name: Literal["rloo"] = "rloo"
    """the algorithm"""
    kl_in: Literal["loss", "reward", "advantage"] = "reward"
    """place of the KL term; reward: its sum over a row is subtracted from the reward before baselines are computed (the
    paper, TRL); advantage: its sum over a token and all later ones is subtracted from the token's advantage (OpenRLHF);
    loss: it is added to each token's loss"""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """estimator of the KL divergence (Schulman 2020, "Approximating KL Divergence"); k1 can't be used in the loss"""
    loss_agg: LossAggregation = "seq-mean-token-sum"
    """reduction of token losses to one number; the paper's is seq-mean-token-sum, the mean over rows of a row's sum;
    verl's is token-mean"""
    ratio_level: Literal["none", "token", "sequence"] = "none"
    """level of the probability ratio; none: no ratio (the paper); token: PPO's clipped ratio per token (verl,
    OpenRLHF); sequence: one clipped ratio per row, the product over its tokens (TRL)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        clips = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
        given = [name for name in clips if getattr(self, name) != getattr(ClippedConfig, name)]
        if given and self.ratio_level == "none":
            raise ValueError(
                f"algo.{given[0]} is {getattr(self, given[0])}, but with algo.ratio_level none there is no ratio to "
                "clip; leave it out, or set algo.ratio_level to token or sequence"
            )
        if self.kl_coef > 0 and self.kl_in == "advantage" and self.ratio_level == "sequence":
            raise ValueError(
                "algo.kl_in is advantage and algo.ratio_level is sequence, but that gives every token an advantage of "
                "its own, and a row's one ratio needs one for all; set algo.kl_in to reward, or algo.ratio_level to "
                "token"
            )


@dataclass(frozen=True)
class ReinforcePpSettings(ClippedConfig):
    """Settings of both forms."""

    std: Deviation = "unbiased"
    """divisor of the standard deviation of n values: n - 1 (unbiased; verl) or n (biased; OpenRLHF)"""


@dataclass(frozen=True)
class ReinforcePpConfig(ReinforcePpSettings):
    """Each token's return, normalised over the batch (arXiv:2501.03262, Eq. 6 to 8)."""

    name: Literal["reinforce_pp"] = "reinforce_pp"
    """the algorithm"""
    kl_in: Literal["loss", "reward", "advantage"] = "advantage"
    """place of the KL term; advantage: its sum over a token and all later ones is subtracted from the token's return
    (the paper); reward: its sum over a row is subtracted from the reward; loss: it is added to each token's loss"""
    kl_estimator: KlEstimator = "k1"
    """estimator of the KL divergence (Schulman 2020, "Approximating KL Divergence"); k1 can't be used in the loss"""


@dataclass(frozen=True)
class ReinforcePpBaselineConfig(ReinforcePpSettings):
    """Rewards relative to their group's mean, normalised over the batch (arXiv:2501.03262, section 3.3)."""

    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    """the algorithm"""
    kl_estimator: KlEstimator = "k2"
    """estimator of the KL divergence (Schulman 2020, "Approximating KL Divergence"); k1 can't be used in the loss"""
    whiten_over: Literal["rows", "tokens"] = "rows"
    """values of the batch's standard deviation; rows: one per response, whose mean is 0; tokens: one per token, so that
    long responses count for more, with the mean subtracted too (verl)"""
