"""Settings of learning from pairs of responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Interval

from spmdrl.algorithms.settings.algo_config import AlgoConfig, LossAggregation


@dataclass(frozen=True)
class PreferenceConfig:
    """Learning which response is preferred (DPO, arXiv:2305.18290)."""

    loss_type: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid"
    """loss of a pair whose log-ratios to the reference, summed over tokens, differ by h; sigmoid: -log sigmoid(beta h)
    (DPO); ipo: (h - 1 / (2 beta))^2 (arXiv:2310.12036); hinge: max(0, 1 - beta h) (SLiC, arXiv:2305.10425); robust:
    sigmoid's, unbiased where label_smoothing is the share of swapped labels (arXiv:2403.00409)"""
    beta: Annotated[float, Gt(0)] = 0.1
    """strength of the pull to the reference; a response's implicit reward is beta times its log-ratio"""
    label_smoothing: Annotated[float, Interval(ge=0, lt=0.5)] = 0.0
    """assumed share of pairs with swapped labels, in loss_type sigmoid (conservative DPO) and robust"""
    reference_free: bool = False
    """use log-probs in place of log-ratios, without loading a reference model"""
    length_normalized: bool = False
    """use means of log-ratios over a response's tokens, as TRL's ipo does, rather than the papers' sums"""
    sft_coef: Annotated[float, Ge(0)] = 0.0
    """weight of the preferred response's negative log-likelihood per token (RPO, arXiv:2404.19733, Eq. 1); 0: none"""

    def __post_init__(self) -> None:
        if self.label_smoothing > 0 and self.loss_type not in ("sigmoid", "robust"):
            raise ValueError(
                f"label_smoothing is {self.label_smoothing}, but loss_type {self.loss_type} has no form with it; set "
                "label_smoothing to 0, or loss_type to sigmoid or robust"
            )


# Weights and penalties of single tokens have no meaning in a loss of whole pairs.
_FIXED = {"kl_in": "loss", "loss_agg": "seq-mean-token-sum", "rollout_is": "none", "off_policy_bound": None}


@dataclass(frozen=True)
class OnlineDpoConfig(PreferenceConfig, AlgoConfig):
    """DPO on the best and the worst response to each prompt (arXiv:2402.04792)."""

    name: Literal["online_dpo"] = "online_dpo"
    """the algorithm"""
    loss_agg: LossAggregation = "seq-mean-token-sum"
    """reduction of token losses; a mean over pairs has no other form"""

    def __post_init__(self) -> None:
        PreferenceConfig.__post_init__(self)
        AlgoConfig.__post_init__(self)
        for key, only in _FIXED.items():
            value = getattr(self, key)
            if value != only:
                raise ValueError(
                    f"algo.{key} is {value}, but the loss of online_dpo is that of whole pairs of responses; leave "
                    f"algo.{key} out"
                )
