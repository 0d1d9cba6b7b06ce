"""KL terms of the loss, the entropy bonus and the masking of off-policy rows, against numpy and exact expectations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.algorithms.random_rows import Rows

from spmdrl.algorithms.policy.grpo import Grpo
from spmdrl.algorithms.policy.ppo import Ppo
from spmdrl.algorithms.settings.actor_critic_configs import PpoConfig
from spmdrl.algorithms.settings.policy_configs import GrpoConfig
from spmdrl.algorithms.terms.kl import adapted_kl_coef, kl_estimate, kl_loss
from spmdrl.nouns.batch import TokenTerms

LOGITS = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([-1.1, -0.9, -1.4, -2.0], dtype=torch.float64).log_softmax(-1)
OLD = torch.tensor([0.5, -0.5, 0.4, 0.0], dtype=torch.float64).log_softmax(-1)


def exact_gradient() -> torch.Tensor:
    """Of KL(policy || reference) over all tokens."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    return torch.autograd.grad((logprobs.exp() * (logprobs - REFERENCE)).sum(), logits)[0]


def expected_gradient(estimator, gradient, drawn_by) -> torch.Tensor:
    """Of the loss term, over all tokens that `drawn_by` could draw."""
    logits = LOGITS.clone().requires_grad_()
    term = kl_loss(logits.log_softmax(-1), REFERENCE, OLD, estimator, gradient)
    return torch.autograd.grad((drawn_by.exp() * term).sum(), logits)[0]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_importance_weights_give_the_divergence_its_gradient_for_tokens_of_the_old_policy(estimator):
    torch.testing.assert_close(
        expected_gradient(estimator, "importance", OLD), exact_gradient(), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_straight_through_has_the_gradient_of_the_divergence_for_tokens_of_the_policy(estimator):
    policy = LOGITS.log_softmax(-1)
    found = expected_gradient(estimator, "straight_through", policy)
    torch.testing.assert_close(found, exact_gradient(), rtol=1e-12, atol=1e-14)


def test_the_plain_gradient_of_k3_is_another():
    assert not torch.allclose(expected_gradient("k3", "plain", LOGITS.log_softmax(-1)), exact_gradient(), rtol=0.1)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("gradient", ["plain", "importance", "straight_through"])
def test_the_value_is_the_estimate(estimator, gradient):
    policy = LOGITS.log_softmax(-1)
    ratio = (policy - OLD).exp() if gradient == "importance" else 1.0
    found = kl_loss(policy, REFERENCE, OLD, estimator, gradient)
    torch.testing.assert_close(found, ratio * kl_estimate(policy, REFERENCE, estimator), rtol=1e-12, atol=0)


@given(st.lists(st.floats(0, 30), max_size=20), st.floats(0.1, 10), st.floats(0.01, 1))
def test_the_coefficient_follows_its_target_as_in_ziegler(divergences, target, gain):
    """e_t = clip((KL_t - target) / target, -0.2, 0.2); beta_{t + 1} = beta_t (1 + K e_t)."""
    errors = [np.clip((divergence - target) / target, -0.2, 0.2) for divergence in divergences]
    expected, found = 0.15 * np.prod([1 + gain * error for error in errors]), 0.15
    for divergence in divergences:
        found = adapted_kl_coef(found, divergence, target=target, gain=gain)
    assert found == pytest.approx(expected, rel=1e-12)


def test_ppo_adapts_its_coefficient_to_the_mean_over_responses_of_their_sums():
    rows = Rows.drawn([3, 1, 5, 2], seed=4)
    inputs = rows.inputs()
    divergence = np.mean([rows.kl(row).sum() for row in range(4)])
    adaptive = Ppo(PpoConfig(kl_coef=0.2, kl_target=1.1 * divergence, kl_gain=0.5))
    assert adaptive.adapted_keys == adaptive.adapted(inputs).keys() == {"kl_coef"}
    assert adaptive.adapted(inputs)["kl_coef"] == pytest.approx(0.2 * (1 + 0.5 * (1 / 1.1 - 1)), rel=1e-12)
    inputs.columns.values("rollout_logprobs")[0] = float("nan")
    assert adaptive.adapted(inputs) == {"kl_coef": 0.2}
    inputs = rows.inputs()
    metrics = adaptive.credit_metrics(inputs)
    assert float(metrics["kl_per_response"].mean()) == pytest.approx(divergence, rel=1e-12)
    assert float(metrics["kl_coef"]) == 0.2
    fixed = Ppo(PpoConfig(kl_coef=0.2))
    assert not fixed.adapted_keys and not fixed.adapted(inputs) and "kl_coef" not in fixed.credit_metrics(inputs)


@pytest.mark.parametrize("keys", [{}, {"kl_coef": 0.1, "kl_in": "loss", "kl_estimator": "k3"}])
def test_a_target_without_a_kl_term_in_the_reward_is_refused(keys):
    with pytest.raises(ValueError, match="set algo.kl_target, or leave algo.kl_gain out"):
        PpoConfig(kl_coef=0.1, kl_gain=0.2)
    with pytest.raises(ValueError, match="set algo.kl_coef to its first value and algo.kl_in to reward"):
        PpoConfig(kl_target=3.0, **keys)


def test_k1_in_the_loss_is_fine_where_its_gradient_is():
    for gradient in ("importance", "straight_through"):
        assert "ref_logprobs" in Grpo(
            GrpoConfig(kl_coef=0.1, kl_estimator="k1", kl_gradient=gradient)
        ).columns_for_loss(1)


def test_a_kl_term_outside_of_the_loss_has_no_gradient_to_choose():
    with pytest.raises(ValueError, match="leave algo.kl_gradient out, or set algo.kl_in to loss"):
        GrpoConfig(kl_coef=0.1, kl_in="reward", kl_gradient="importance")


def terms(logprobs_R, row_of_token_R, **columns) -> TokenTerms:
    entropy_R = -logprobs_R.exp()
    return TokenTerms(logprobs_R, entropy_R, columns, row_of_token_R, int(row_of_token_R.max()) + 1)


def test_the_entropy_is_subtracted_and_gives_rows_without_an_advantage_a_gradient():
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    algorithm = Grpo(GrpoConfig(entropy_coef=0.5))
    assert not algorithm.needs_signal()
    loss = algorithm.loss(terms(logprobs, torch.tensor([0, 0]), advantages=torch.zeros(2, dtype=torch.float64)))
    (gradient,) = torch.autograd.grad(loss.loss_R.sum(), logprobs)
    torch.testing.assert_close(gradient, 0.5 * logprobs.detach().exp(), rtol=1e-12, atol=0)


def test_far_rows_with_a_negative_advantage_are_left_out_of_the_loss():
    rng = np.random.default_rng(0)
    lengths = [3, 1, 4, 2, 2]
    row_R = np.repeat(np.arange(5), lengths)
    policy, rollout = rng.normal(size=(2, row_R.size)) - 2
    advantages = np.array([-1.0, -0.5, 1.0, -2.0, 0.0])[row_R]
    drift = np.array([(rollout - policy)[row_R == row].mean() for row in range(5)])
    bound = float(np.median(drift))
    masked = (drift > bound)[row_R] & (advantages < 0)
    assert 0 < masked.sum() < (advantages < 0).sum()
    given = terms(
        torch.tensor(policy), torch.tensor(row_R), advantages=torch.tensor(advantages),
        rollout_logprobs=torch.tensor(rollout),
    )  # fmt: skip
    algorithm = Grpo(GrpoConfig(off_policy_bound=bound))
    assert "rollout_logprobs" in algorithm.columns_for_loss(1)
    loss = algorithm.loss(given)
    np.testing.assert_allclose(loss.loss_R.numpy(), np.where(masked, 0.0, -advantages), rtol=1e-12)
    assert np.array_equal(loss.metrics["off_policy/masked_share"].numpy(), masked)
