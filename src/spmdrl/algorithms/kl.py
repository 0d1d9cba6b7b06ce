"""Estimators of KL(policy || reference) from samples of the policy (Schulman 2020, "Approximating KL Divergence")."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from spmdrl.algorithms.ratios import bounded_exp


def kl_estimate(logprobs_R: Tensor, ref_logprobs_R: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """One estimate per token, with r = reference probability / policy probability.

    k1 = -log r (unbiased, high variance), k2 = (log r)^2 / 2, k3 = (r - 1) - log r (unbiased, never negative).
    k3's r is bounded; its -log r isn't, as it can't overflow.
    """
    log_ratio_R = ref_logprobs_R - logprobs_R
    if estimator == "k1":
        return -log_ratio_R
    if estimator == "k2":
        return log_ratio_R.square() / 2
    return bounded_exp(log_ratio_R) - 1 - log_ratio_R
