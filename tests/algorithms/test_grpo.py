"""GRPO's pure functions against numpy in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.algorithms.random_rows import SETTINGS

from spmdrl.algorithms.policy.grpo import Grpo
from spmdrl.algorithms.settings.algo_config import EPSILON, ClipRange
from spmdrl.algorithms.settings.policy_configs import GrpoConfig
from spmdrl.algorithms.terms.advantages import group_relative_advantages
from spmdrl.algorithms.terms.kl import kl_estimate
from spmdrl.algorithms.terms.losses import clipped_policy_loss, sequence_mean, token_weights
from spmdrl.nouns.batch import Batch, CreditInputs, LossScope, TokenTerms

REWARDS = st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=24)


@given(REWARDS)
@settings(max_examples=50, deadline=None)
def test_group_advantages_equal_numpy(rewards):
    groups = np.arange(len(rewards)) // 4
    expected = np.full(len(rewards), np.nan)
    for group in np.unique(groups):
        values = np.asarray(rewards)[groups == group]
        deviation = values.std(ddof=1) if len(values) > 1 else 0.0
        expected[groups == group] = (values - values.mean()) / (deviation + EPSILON)
    got = group_relative_advantages(torch.tensor(rewards), torch.tensor(groups), "group")
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_batch_scaling_divides_by_the_deviation_of_all_rewards():
    rewards = np.array([0.0, 1.0, 1.0, 1.0, 0.0])
    centred = np.array([-0.5, 0.5, 0.0, 0.0, 0.0])
    got = group_relative_advantages(torch.tensor(rewards), torch.tensor([0, 0, 1, 1, 2]), "batch")
    np.testing.assert_allclose(got.numpy(), centred / (rewards.std(ddof=1) + EPSILON), rtol=1e-5)


def test_without_scaling_advantages_are_centred_rewards():
    got = group_relative_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64), "none")
    np.testing.assert_allclose(got.numpy(), [0.75, -0.25, -0.25, -0.25])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_follow_their_definition(estimator):
    rng = np.random.default_rng(0)
    policy, reference = rng.normal(size=(2, 50)) - 2
    ratio = np.exp(reference - policy)
    expected = {"k1": -np.log(ratio), "k2": np.log(ratio) ** 2 / 2, "k3": ratio - 1 - np.log(ratio)}[estimator]
    got = kl_estimate(torch.tensor(policy), torch.tensor(reference), estimator)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12)


def test_clipped_loss_equals_numpy_with_clip_higher_and_dual_clip():
    rng = np.random.default_rng(1)
    log_ratio, advantages = rng.normal(size=(2, 200))
    ratio = np.exp(log_ratio)
    expected = -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.28) * advantages)
    expected = np.where(advantages < 0, np.minimum(expected, -3.0 * advantages), expected)
    got = clipped_policy_loss(torch.tensor(log_ratio), torch.tensor(advantages), ClipRange(0.2, 0.28, 3.0))
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12)


def test_the_sequence_ratio_is_the_row_mean_and_carries_its_gradient():
    log_ratio = torch.tensor([1.0, 3.0, 5.0], requires_grad=True)
    got = sequence_mean(log_ratio, torch.tensor([0, 0, 1]), 2)
    assert got.tolist() == [2.0, 2.0, 5.0]
    got[0].backward()
    assert log_ratio.grad.tolist() == [0.5, 0.5, 0.0]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", [1 / 8, 1 / 8, 1 / 8]),
        ("seq-mean-token-mean", [1 / 6, 1 / 6, 1 / 3]),
        ("seq-mean-token-sum", [1 / 3, 1 / 3, 1 / 3]),
        ("seq-mean-token-sum-norm", [1 / 30, 1 / 30, 1 / 30]),
    ],
)
def test_token_weights_make_the_global_mean(aggregation, expected):
    scope = LossScope(num_tokens=8, num_rows=3, max_length=10)
    weights = token_weights(torch.tensor([2, 1]), aggregation, scope)
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-6)


def terms(logprobs, **columns):
    size = logprobs.numel()
    given_columns = {"advantages": torch.ones(size), **columns}
    return TokenTerms(logprobs, torch.zeros(size), given_columns, torch.zeros(size, dtype=torch.int64), 1)


def test_the_only_update_has_the_policy_gradient_and_needs_no_old_logprobs():
    algorithm = Grpo(GrpoConfig())
    assert "old_logprobs" not in algorithm.columns_for_loss(1)
    assert "old_logprobs" in algorithm.columns_for_loss(2)
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss = algorithm.loss(terms(logprobs, advantages=torch.tensor([0.5, -1.5])))
    loss.loss_R.sum().backward()
    assert logprobs.grad.tolist() == [-0.5, 1.5]


def test_the_reference_is_asked_for_only_with_a_kl_term():
    assert "ref_logprobs" not in Grpo(GrpoConfig()).columns_for_loss(1)
    in_loss = Grpo(GrpoConfig(kl_coef=0.1))
    assert "ref_logprobs" in in_loss.columns_for_loss(1)
    in_reward = Grpo(GrpoConfig(kl_coef=0.1, kl_in="reward"))
    assert "ref_logprobs" in in_reward.columns_for_credit()
    assert "ref_logprobs" not in in_reward.columns_for_loss(1)


def test_rows_without_advantage_may_be_left_out_unless_a_kl_term_gives_them_a_gradient():
    assert Grpo(GrpoConfig()).needs_signal()
    assert Grpo(GrpoConfig(kl_coef=0.1, kl_in="reward")).needs_signal()
    assert not Grpo(GrpoConfig(kl_coef=0.1)).needs_signal()


def test_the_kl_term_is_added_to_the_loss():
    logprobs, reference = torch.tensor([-1.0]), torch.tensor([-1.5])
    in_loss = Grpo(GrpoConfig(kl_coef=0.1, kl_estimator="k2")).loss(terms(logprobs, ref_logprobs=reference))
    assert in_loss.loss_R.item() == pytest.approx(-1.0 + 0.1 * 0.125)


def credit_inputs(seed: int = 0) -> tuple[CreditInputs, list[np.ndarray]]:
    """Six rows of two prompts with log-probs of policy and reference, and each row's k1 estimates."""
    rng = np.random.default_rng(seed)
    lengths = [3, 1, 2, 4, 2, 1]
    rows = [rng.normal(size=(2, length)).astype(np.float32) - 2 for length in lengths]
    columns = Batch.of_rows(range(len(lengths)))
    for number, name in enumerate(("rollout_logprobs", "ref_logprobs")):
        columns.put_lists(name, [row[number].tolist() for row in rows], torch.float32)
    rewards = torch.tensor(rng.normal(size=len(lengths)).astype(np.float32))
    inputs = CreditInputs(rewards, torch.tensor([4, 4, 4, 7, 7, 7]), torch.tensor(lengths), columns, SETTINGS)
    return inputs, [(row[0].astype(np.float64) - row[1]) for row in rows]


def test_kl_in_the_reward_is_taken_off_before_groups_are_compared():
    inputs, kl = credit_inputs()
    config = GrpoConfig(kl_coef=0.1, kl_in="reward", kl_estimator="k1", scale_rewards="none")
    lowered = inputs.rewards_B.double().numpy() - 0.1 * np.array([row.sum() for row in kl])
    expected = np.concatenate([lowered[:3] - lowered[:3].mean(), lowered[3:] - lowered[3:].mean()])
    got = Grpo(config).advantages(inputs)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(Grpo(config).credit_metrics(inputs)["kl"].numpy(), np.concatenate(kl), rtol=1e-5)
    assert Grpo(GrpoConfig(kl_coef=0.1)).credit_metrics(inputs) == {}


def test_kl_in_the_advantage_is_what_a_token_and_all_later_ones_of_its_row_cost():
    inputs, kl = credit_inputs(1)
    config = GrpoConfig(kl_coef=0.1, kl_in="advantage", kl_estimator="k1", scale_rewards="none")
    rewards = inputs.rewards_B.double().numpy()
    centred = np.concatenate([rewards[:3] - rewards[:3].mean(), rewards[3:] - rewards[3:].mean()])
    expected = [
        row_advantage - 0.1 * sum(row[place:])
        for row_advantage, row in zip(centred, kl, strict=True)
        for place in range(len(row))
    ]
    got = Grpo(config).advantages(inputs)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_rows_without_a_reward_are_left_out_for_that_reason():
    inputs = credit_inputs()[0]
    inputs.rewards_B[torch.tensor([1, 5])] = float("nan")
    assert {
        reason: rows.nonzero().flatten().tolist() for reason, rows in Grpo(GrpoConfig()).select(inputs).items()
    } == {"no_reward": [1, 5]}


def test_k1_in_the_loss_pulls_nowhere_and_is_refused():
    with pytest.raises(ValueError, match=r"k1's gradient .* set algo.kl_estimator to k3 or k2, "):
        GrpoConfig(kl_coef=0.1, kl_in="loss", kl_estimator="k1")
    GrpoConfig(kl_coef=0.1, kl_in="reward", kl_estimator="k1")
    GrpoConfig(kl_coef=0.0, kl_in="loss", kl_estimator="k1")


def test_the_expected_gradient_of_k1_in_the_loss_is_zero_and_of_k3_and_k2_is_not():
    logits, reference = torch.tensor([0.3, -1.0, 0.8], requires_grad=True), torch.tensor([-1.1, -0.9, -1.4])
    expected = {}
    for estimator in ("k1", "k2", "k3"):
        logprobs = logits.log_softmax(-1)
        estimates = kl_estimate(logprobs, reference, estimator)
        # Sampled tokens are constants: only the estimates carry gradient.
        (expected[estimator],) = torch.autograd.grad((logprobs.exp().detach() * estimates).sum(), logits)
    assert expected["k1"].abs().max() < 1e-7
    assert expected["k2"].abs().max() > 0.1 and expected["k3"].abs().max() > 0.1
