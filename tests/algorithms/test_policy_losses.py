"""Policy losses against their equations in numpy, on ragged rows, with gradients by finite differences.

Each equation gets a row's tokens under the policy, `new`, and the same, `fixed`, where it takes no gradient.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.algorithms.random_rows import MAX_LENGTH, Rows, aggregated, packed, slopes

from spmdrl.algorithms.settings.actor_critic_configs import PpoConfig
from spmdrl.algorithms.settings.distillation_configs import OpdConfig
from spmdrl.algorithms.settings.policy_configs import (
    CispoConfig,
    DapoConfig,
    DppoConfig,
    DrGrpoConfig,
    GrpoConfig,
    GrpoPaperConfig,
    GspoConfig,
    ReinforcePpBaselineConfig,
    ReinforcePpConfig,
    SapoConfig,
)
from spmdrl.algorithms.table import build_algorithm
from spmdrl.nouns.batch import LossScope

LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=8)


def clipped(rows, row, A, new, fixed, config):
    """-min(r A, clip(r, 1 - low, 1 + high) A); for negative A at most -c A."""
    r = np.exp(new - rows.old[row])
    loss = -np.minimum(r * A, np.clip(r, 1 - config.clip_ratio_low, 1 + config.clip_ratio_high) * A)
    return loss if config.clip_ratio_c is None else np.where(A < 0, np.minimum(loss, -config.clip_ratio_c * A), loss)


def grpo_paper(rows, row, A, new, fixed, config):
    """... + beta (pi_ref / pi - log(pi_ref / pi) - 1)."""
    d = rows.reference[row] - new
    return clipped(rows, row, A, new, fixed, config) + 0.04 * (np.exp(d) - d - 1)


def gspo(rows, row, A, new, fixed, config):
    """s = exp(mean over the row of log r); -min(s A, clip(s) A) for the row."""
    s = np.exp((new - rows.old[row]).mean())
    s_clipped = np.clip(s, 1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    return -np.minimum(s * A, s_clipped * A)


def cispo(rows, row, A, new, fixed, config):
    """-sg(clip(r, is_min, is_max)) A log pi."""
    return -np.clip(np.exp(fixed - rows.old[row]), config.is_min, config.is_max) * A * new


def sapo(rows, row, A, new, fixed, config):
    """-4 / tau sigmoid(tau (r - 1)) A."""
    tau = np.where(A > 0, config.tau_positive, config.tau_negative)
    return -4 / tau / (1 + np.exp(-tau * (np.exp(new - rows.old[row]) - 1))) * A


def dppo(rows, row, A, new, fixed, config):
    """-M sg(min(r, is_max)) A log pi, M = 0 where pi moved in A's direction further than the bound."""
    anchor = rows.rollout[row] if config.anchor == "rollout" else rows.old[row]
    p, q = np.exp(fixed), np.exp(anchor)
    low, high = config.bounds
    D = np.abs(p - q) if config.divergence == "tv" else q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
    masked = (A > 0) & (p > q) & (high < D) | (A < 0) & (p < q) & (low < D)
    return np.where(masked, 0, -np.minimum(p / q, config.is_max) * A * new)


CASES = [
    (GrpoConfig(clip_ratio_low=0.1, clip_ratio_high=0.15), clipped),
    (GrpoConfig(clip_ratio_c=1.1), clipped),
    (GrpoPaperConfig(), grpo_paper),
    (DrGrpoConfig(clip_ratio_low=0.1), clipped),
    (DapoConfig(), clipped),
    (GspoConfig(), gspo),
    (GspoConfig(clip_ratio_low=0.05, clip_ratio_high=0.1, loss_agg="token-mean"), gspo),
    (CispoConfig(is_min=0.9, is_max=1.1), cispo),
    (CispoConfig(), cispo),
    (SapoConfig(), sapo),
    (SapoConfig(tau_positive=3.0, tau_negative=0.5), sapo),
    (DppoConfig(divergence_bounds=(0.02, 0.01)), dppo),
    (DppoConfig(divergence="kl", divergence_bounds=(2e-3, 1e-3)), dppo),
    (DppoConfig(anchor="old", is_max=1.05), dppo),
    (ReinforcePpConfig(clip_ratio_low=0.1), clipped),
    (PpoConfig(clip_ratio_low=0.1, clip_ratio_c=1.1), clipped),
    (OpdConfig(clip_ratio_low=0.1), clipped),
    (ReinforcePpBaselineConfig(clip_ratio_high=0.1), clipped),
]


@pytest.mark.parametrize(("config", "equation"), CASES)
@given(LENGTHS, st.integers(0, 999))
@settings(max_examples=15)
def test_losses_and_gradients_are_those_of_the_equations(config, equation, lengths, seed):
    rows, algorithm = Rows.drawn(lengths, seed), build_algorithm(config)
    values = np.random.default_rng(seed).normal(size=len(lengths))
    advantages = [np.full(length, value) for length, value in zip(lengths, values, strict=True)]

    def loss_by_numpy(policy: list[np.ndarray]) -> float:
        parts = [equation(rows, row, advantages[row], new, rows.policy[row], config) for row, new in enumerate(policy)]
        return aggregated(parts, config.loss_agg)

    policy_R = packed(rows.policy).requires_grad_()
    token_loss = algorithm.loss(rows.terms(policy_R, advantages))
    scope = LossScope(sum(lengths), len(lengths), MAX_LENGTH)
    loss = (algorithm.token_weights(torch.tensor(lengths), scope) * token_loss.loss_R).sum()
    assert loss.item() == pytest.approx(loss_by_numpy(rows.policy), rel=1e-12, abs=1e-13)
    loss.backward()
    np.testing.assert_allclose(policy_R.grad.numpy(), slopes(loss_by_numpy, rows.policy), rtol=1e-5, atol=1e-7)
    assert {"old_logprobs"} <= algorithm.columns_for_loss(2) or config.name == "dppo"


def test_an_exact_copy_of_the_generator_is_never_clipped_and_has_the_policy_gradient():
    rows = Rows.drawn([3, 1, 4, 2], 5)
    for config, _ in CASES:
        algorithm = build_algorithm(config)
        if not algorithm.needs_signal():
            continue
        policy_R = packed(rows.rollout).requires_grad_()
        terms = rows.terms(
            policy_R,
            [np.full(length, value) for length, value in zip(rows.lengths, [1.0, -2.0, 0.5, 3.0], strict=True)],
        )
        terms.columns.pop("old_logprobs")
        token_loss = algorithm.loss(terms)
        (gradient,) = torch.autograd.grad(token_loss.loss_R.sum(), policy_R)
        np.testing.assert_allclose(gradient.numpy(), -terms.columns["advantages"].numpy(), rtol=1e-12)


def test_a_ratio_to_the_generator_is_not_weighed_by_it_once_more():
    with pytest.raises(ValueError, match="leave algo.rollout_is out, or set algo.anchor to old"):
        DppoConfig(rollout_is="tis")
    DppoConfig(rollout_is="tis", anchor="old")
