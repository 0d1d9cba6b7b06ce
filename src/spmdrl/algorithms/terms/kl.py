"""Estimates of KL(policy || reference) from sampled tokens, and their gradients in a loss.

Shape letters: `R` response tokens, packed.
"""

from __future__ import annotations

from torch import Tensor

from spmdrl.algorithms.settings.algo_config import KlEstimator, KlGradient
from spmdrl.algorithms.terms.losses import bounded_exp


def kl_estimate(logprobs_R: Tensor, ref_logprobs_R: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimate KL(policy || reference) per token (Schulman 2020, "Approximating KL Divergence").

    With r = reference probability / policy probability:

    k1 = -log r (unbiased, high variance), k2 = (log r)^2 / 2, k3 = (r - 1) - log r (unbiased, never negative).
    k3's r is bounded; its -log r isn't, as it can't overflow.
    """
    log_ratio_R = ref_logprobs_R - logprobs_R
    if estimator == "k1":
        return -log_ratio_R
    if estimator == "k2":
        return log_ratio_R.square() / 2
    return bounded_exp(log_ratio_R) - 1 - log_ratio_R


def adapted_kl_coef(kl_coef: float, divergence: float, *, target: float, gain: float) -> float:
    """Return beta (1 + K e), e = clip((KL - target) / target, -0.2, 0.2): the controller of Ziegler et al. 2019,
    section 2.2 (arXiv:1909.08593)."""
    error = min(max(divergence / target - 1, -0.2), 0.2)
    return kl_coef * (1 + gain * error)


def kl_loss(
    logprobs_R: Tensor, ref_logprobs_R: Tensor, old_logprobs_R: Tensor, estimator: KlEstimator, gradient: KlGradient
) -> Tensor:
    """Return the estimate of KL(policy || reference) as a term of the loss, for tokens drawn by the old policy.

    plain: its own gradient, for fixed tokens (GRPO, arXiv:2402.03300, Eq. 4). importance: times policy / old policy, so
    that the expected gradient is that of the divergence (DeepSeek-V3.2, arXiv:2512.02556, Eq. 7). straight_through: the
    value of the estimate with the gradient of k2, whose expectation under the policy is that of the divergence too.
    """
    kl_R = kl_estimate(logprobs_R, ref_logprobs_R, estimator)
    if gradient == "importance":
        return bounded_exp(logprobs_R - old_logprobs_R) * kl_R
    if gradient == "straight_through":
        with_gradient_R = kl_estimate(logprobs_R, ref_logprobs_R, "k2")
        return with_gradient_R + (kl_R - with_gradient_R).detach()
    return kl_R
