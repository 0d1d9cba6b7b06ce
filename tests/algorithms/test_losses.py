"""Bounded ratios against numpy in float64, and what becomes of log-ratios that no float32 can hold the exp of."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmdrl.algorithms.policy.grpo import Grpo
from spmdrl.algorithms.settings.algo_config import ClipRange
from spmdrl.algorithms.settings.policy_configs import GrpoConfig
from spmdrl.algorithms.terms.correction import correction_rule
from spmdrl.algorithms.terms.kl import kl_estimate
from spmdrl.algorithms.terms.losses import bounded_exp, clipped_policy, clipped_policy_loss, is_beyond_bound
from spmdrl.nouns.batch import TokenTerms

EXTREMES = [0.0, -0.0, 1.0, -1.0, 19.999, 20.0, -20.0, 20.001, -20.001, 88.0, 89.0, -89.0, 1e4, -1e4, 1e30, -1e30]


def gradient_of(values: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(values.sum(), of)[0]


@given(st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=40))
def test_inside_the_bound_a_ratio_and_its_gradient_are_those_of_exp_to_the_bit(values):
    log_ratio = torch.tensor(values, requires_grad=True)
    bounded, plain = bounded_exp(log_ratio), log_ratio.exp()
    assert torch.equal(bounded, plain)
    assert torch.equal(gradient_of(bounded, log_ratio), gradient_of(plain, log_ratio))
    assert not is_beyond_bound(log_ratio).any()


def test_beyond_the_bound_a_ratio_and_its_gradient_stay_those_at_the_bound():
    log_ratio = torch.tensor(EXTREMES, requires_grad=True)
    bounded = bounded_exp(log_ratio)
    expected = np.exp(np.clip(np.asarray(EXTREMES, dtype=np.float64), -20, 20))
    np.testing.assert_allclose(bounded.detach().numpy(), expected, rtol=2e-6)
    np.testing.assert_allclose(gradient_of(bounded, log_ratio).numpy(), expected, rtol=2e-6)
    assert is_beyond_bound(log_ratio).tolist() == [abs(value) > 20 for value in EXTREMES]


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("dual", [None, 3.0])
def test_extreme_ratios_have_the_loss_that_numpy_gives_the_bounded_ones(advantage, dual):
    log_ratio = torch.tensor(EXTREMES, requires_grad=True)
    loss = clipped_policy_loss(log_ratio, torch.full((len(EXTREMES),), advantage), ClipRange(0.2, 0.2, dual))
    ratio = np.exp(np.clip(np.asarray(EXTREMES, dtype=np.float64), -20, 20))
    expected = -np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
    if dual is not None and advantage < 0:
        expected = np.minimum(expected, -dual * advantage)
    np.testing.assert_allclose(loss.detach().numpy(), expected, rtol=3e-6)
    assert gradient_of(loss, log_ratio).isfinite().all()


def test_k3_pulls_back_tokens_however_far_they_are_from_the_reference():
    policy = torch.tensor([-30.0, -100.0, -1e4, -1.0, -1.0], requires_grad=True)
    reference = torch.tensor([-1.0, -1.0, -1.0, -200.0, -1.0])
    log_ratio = reference.double().numpy() - policy.detach().double().numpy()
    ratio = np.exp(np.clip(log_ratio, -20, 20))
    kl = kl_estimate(policy, reference, "k3")
    np.testing.assert_allclose(kl.detach().numpy(), ratio - 1 - log_ratio, rtol=2e-6)
    np.testing.assert_allclose(gradient_of(kl, policy).numpy(), 1 - ratio, rtol=2e-6)


@pytest.mark.parametrize("kind", ["tis", "icepop", "seq-mask-tis"])
def test_corrections_of_extreme_ratios_are_finite_and_masked_as_in_float64(kind):
    log_ratio, rows = torch.tensor(EXTREMES), torch.arange(len(EXTREMES))
    given_32 = correction_rule(kind, None)(log_ratio, rows, len(EXTREMES))
    given_64 = correction_rule(kind, None)(log_ratio.double(), rows, len(EXTREMES))
    np.testing.assert_allclose(given_32.weights_R.numpy(), given_64.weights_R.numpy(), rtol=2e-6)
    assert given_32.ratio_R.isfinite().all()
    assert torch.equal(given_32.masked_R.double(), given_64.masked_R)


@pytest.mark.parametrize(
    "config",
    [
        GrpoConfig(),
        GrpoConfig(ratio_level="sequence"),
        GrpoConfig(kl_coef=0.1),
        GrpoConfig(kl_coef=0.1, kl_estimator="k2"),
        GrpoConfig(rollout_is="tis"),
        GrpoConfig(rollout_is="icepop", kl_coef=0.1, ratio_level="sequence"),
        GrpoConfig(rollout_is="seq-mask-tis"),
    ],
)
def test_no_pair_of_log_probs_makes_a_loss_or_gradient_that_is_not_finite(config):
    logprobs = torch.tensor([-0.5, -200.0, -0.5, -1e4, -3.0], requires_grad=True)
    columns = {
        "advantages": torch.tensor([1.0, 1.0, -2.0, -2.0, 1.0]),
        "old_logprobs": torch.tensor([-200.0, -0.5, -1e4, -0.5, -3.0]),
        "rollout_logprobs": torch.tensor([-0.5, -200.0, -0.5, -1e4, -3.0]),
    }
    if config.kl_coef:
        columns["ref_logprobs"] = torch.tensor([-300.0, -0.1, -0.5, -0.5, -3.0])
    given_terms = TokenTerms(logprobs, torch.zeros(5), columns, torch.tensor([0, 1, 2, 3, 4]), 5)
    token_loss = Grpo(config).loss(given_terms)
    assert token_loss.loss_R.isfinite().all()
    assert gradient_of(token_loss.loss_R, logprobs).isfinite().all()
    assert all(values.isfinite().all() for values in token_loss.metrics.values())
    assert token_loss.metrics["clip_ratio/bounded_share"].tolist() == [1.0, 1.0, 1.0, 1.0, 0.0]


def test_the_distance_of_an_update_is_the_divergence_of_the_policy_from_the_one_before_it():
    before, now = torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.35, 0.25]], dtype=torch.float64)
    distance = clipped_policy((now / before).log(), torch.ones(3), ClipRange(0.2, 0.2)).metrics["policy_kl"]
    assert (before * distance).sum() == pytest.approx(float((before * (before / now).log()).sum()), rel=1e-9)
    far = clipped_policy(torch.tensor([0.0, 1e30, -1e30]), torch.ones(3), ClipRange(0.2, 0.2)).metrics["policy_kl"]
    assert far[0] == 0 and far.isfinite().all()
