"""Losses of pairs against their equations in numpy, with gradients by finite differences; and which rows make a pair.

Each equation gets h: the preferred response's log-ratio to the reference, less the other's.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.algorithms.random_rows import MAX_LENGTH, SETTINGS, Rows, packed, slopes

from spmdrl.algorithms.policy.online_dpo import OnlineDpo
from spmdrl.algorithms.settings.preference_configs import OnlineDpoConfig
from spmdrl.algorithms.terms.pairs import PairTokens, preference_loss, reward_loss
from spmdrl.nouns.batch import Batch, CreditInputs, LossScope


def log_sigmoid(x):
    return -np.log1p(np.exp(-x))


def sigmoid(h, beta, e):
    """-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)."""
    return -(1 - e) * log_sigmoid(beta * h) - e * log_sigmoid(-beta * h)


def robust(h, beta, e):
    """(-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2 e)."""
    return (-(1 - e) * log_sigmoid(beta * h) + e * log_sigmoid(-beta * h)) / (1 - 2 * e)


def ipo(h, beta, e):
    """(h - 1 / (2 beta))^2."""
    return (h - 1 / (2 * beta)) ** 2


def hinge(h, beta, e):
    """max(0, 1 - beta h)."""
    return np.maximum(0, 1 - beta * h)


CASES = [
    (OnlineDpoConfig(), sigmoid),
    (OnlineDpoConfig(beta=0.7, label_smoothing=0.2), sigmoid),
    (OnlineDpoConfig(loss_type="robust", label_smoothing=0.2), robust),
    (OnlineDpoConfig(loss_type="ipo"), ipo),
    (OnlineDpoConfig(loss_type="ipo", length_normalized=True, beta=0.3), ipo),
    (OnlineDpoConfig(loss_type="hinge", beta=1.3), hinge),
    (OnlineDpoConfig(reference_free=True, sft_coef=0.5), sigmoid),
    (OnlineDpoConfig(length_normalized=True, reference_free=True, beta=2.0), sigmoid),
]


@pytest.mark.parametrize(("config", "equation"), CASES)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=5), st.integers(0, 999))
@settings(max_examples=15)
def test_losses_and_gradients_are_those_of_the_equations(config, equation, lengths, seed):
    rows, algorithm = Rows.drawn([length for pair in lengths for length in pair], seed), OnlineDpo(config)
    is_first = np.random.default_rng(seed).integers(0, 2, len(lengths)) > 0
    signs = [sign for first in is_first for sign in ((1, -1) if first else (-1, 1))]

    def log_ratio(policy: list[np.ndarray], row: int) -> float:
        ratios = policy[row] - (0 if config.reference_free else rows.reference[row])
        return ratios.mean() if config.length_normalized else ratios.sum()

    def loss_by_numpy(policy: list[np.ndarray]) -> float:
        total = 0.0
        for pair, first in enumerate(is_first):
            preferred, other = (2 * pair, 2 * pair + 1) if first else (2 * pair + 1, 2 * pair)
            h = log_ratio(policy, preferred) - log_ratio(policy, other)
            total += equation(h, config.beta, config.label_smoothing)
            # RPO: - alpha log p(preferred) / its tokens.
            total -= config.sft_coef * policy[preferred].mean()
        return total / len(is_first)

    policy_R = packed(rows.policy).requires_grad_()
    advantages = [np.full(length, sign) for length, sign in zip(rows.lengths, signs, strict=True)]
    token_loss = algorithm.loss(rows.terms(policy_R, advantages))
    scope = LossScope(sum(rows.lengths), len(rows.lengths), MAX_LENGTH)
    loss = (algorithm.token_weights(torch.tensor(rows.lengths), scope) * token_loss.loss_R).sum()
    assert loss.item() == pytest.approx(loss_by_numpy(rows.policy), rel=1e-12, abs=1e-12)
    loss.backward()
    np.testing.assert_allclose(policy_R.grad.numpy(), slopes(loss_by_numpy, rows.policy), rtol=1e-5, atol=1e-7)
    margins = [
        config.beta * sum(signs[row] * log_ratio(rows.policy, row) for row in (2 * pair, 2 * pair + 1))
        for pair in range(len(is_first))
    ]
    metrics = {name: values.numpy() for name, values in token_loss.metrics.items() if name.startswith("preference/")}
    np.testing.assert_allclose(metrics["preference/margin"], margins, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(metrics["preference/chosen"] - metrics["preference/rejected"], margins, atol=1e-12)
    assert metrics["preference/accuracy"].tolist() == [float(margin > 0) for margin in margins]


@pytest.mark.parametrize("length_normalized", [False, True])
def test_pairs_that_only_rounding_orders_are_half_right(length_normalized):
    config = OnlineDpoConfig(length_normalized=length_normalized)
    reference_R, signs_R = torch.full((12,), -1.0), torch.tensor([1.0, -1.0] * 2).repeat_interleave(3)
    noise_R = torch.tensor([1e-6, -1e-6]).repeat(6) + 1e-6
    learnt_R = noise_R + torch.tensor([0.0, 0.0, 1e-3, 0.0]).repeat_interleave(3)
    found = []
    for ratio_R in (noise_R, learnt_R, -learnt_R):
        tokens = PairTokens(reference_R + ratio_R, reference_R, signs_R, torch.arange(4).repeat_interleave(3), 4)
        found.append(preference_loss(tokens, config).metrics["preference/accuracy"].tolist())
    assert found == [[0.5, 0.5], [0.5, 1.0], [0.5, 0.0]]


NAN = float("nan")


def credit(rewards: list[float], groups: list[int]) -> CreditInputs:
    lengths_B = torch.ones(len(groups), dtype=torch.int64)
    return CreditInputs(torch.tensor(rewards), torch.tensor(groups), lengths_B, Batch.of_rows([]), SETTINGS)


def test_the_best_and_the_worst_scored_response_of_a_prompt_are_its_pair():
    algorithm = OnlineDpo(OnlineDpoConfig())
    inputs = credit([0.5, 2.0, NAN, -1.0, 1.0, 1.0, 3.0, 0.0, 0.0, 1.0, NAN], [0, 0, 0, 0, 1, 1, 2, 5, 5, 5, 6])
    assert algorithm.row_advantages(inputs.rewards_B, inputs.groups_B).tolist() == [0, 1, 0, -1, 0, 0, 0, -1, 0, 1, 0]
    left_out = {reason: rows.nonzero().flatten().tolist() for reason, rows in algorithm.select(inputs).items()}
    assert left_out == {"no_reward": [2, 10], "tied": [4, 5, 6], "between": [0, 8]}


@given(st.lists(st.sampled_from([0.0, 1.0, 2.5, NAN]), min_size=1, max_size=12), st.integers(1, 4))
def test_two_rows_or_none_of_each_prompt_are_left(rewards, num_responses):
    algorithm, groups = OnlineDpo(OnlineDpoConfig()), [row // num_responses for row in range(len(rewards))]
    inputs = credit(rewards, groups)
    kept = ~torch.stack([*algorithm.select(inputs).values()]).any(0)
    for group in range(groups[-1] + 1):
        own = [row for row in range(len(rewards)) if groups[row] == group]
        left = [rewards[row] for row in own if kept[row]]
        scored = [rewards[row] for row in own if rewards[row] == rewards[row]]
        assert sorted(left) == ([min(scored), max(scored)] if len(set(scored)) > 1 else [])


@pytest.mark.parametrize(
    "changed",
    [{"rollout_is": "tis"}, {"kl_in": "reward"}, {"loss_agg": "token-mean"}, {"off_policy_bound": 0.1}],
)
def test_what_weighs_single_tokens_is_refused(changed):
    with pytest.raises(ValueError, match=rf"algo\.{next(iter(changed))} is .* leave algo\.{next(iter(changed))} out"):
        replace(OnlineDpoConfig(), **changed)


@pytest.mark.parametrize("loss_type", ["ipo", "hinge"])
def test_label_smoothing_without_a_form_is_refused(loss_type):
    with pytest.raises(ValueError, match=f"label_smoothing is 0.1, but loss_type {loss_type}"):
        OnlineDpoConfig(loss_type=loss_type, label_smoothing=0.1)


def test_the_reference_is_read_unless_there_is_none():
    with_reference, without = OnlineDpo(OnlineDpoConfig()), OnlineDpo(OnlineDpoConfig(reference_free=True))
    assert with_reference.columns_for_loss(3) == {"advantages", "ref_logprobs"}
    assert without.columns_for_loss(3) == {"advantages"}


@given(st.integers(1, 6), st.booleans(), st.sampled_from([0.0, 0.01, 0.7]), st.integers(0, 999))
@settings(max_examples=20)
def test_the_loss_of_scores_is_bradley_and_terrys_with_margin_and_centring(num_pairs, has_margin, centring, seed):
    """-log sigmoid(r_w - r_l - m) + c (r_w + r_l)^2."""
    rng = np.random.default_rng(seed)
    scores, margins = [rng.normal(size=2) for _ in range(num_pairs)], rng.normal(size=num_pairs) * has_margin

    def loss_by_numpy(scores: list[np.ndarray]) -> float:
        terms = [
            -log_sigmoid(w - rejected - m) + centring * (w + rejected) ** 2
            for (w, rejected), m in zip(scores, margins, strict=True)
        ]
        return float(np.sum(terms))

    scores_B = packed(scores).requires_grad_()
    found = reward_loss(scores_B, torch.tensor(margins) if has_margin else None, centring)
    loss = found.losses.sum()
    assert loss.item() == pytest.approx(loss_by_numpy(scores), rel=1e-12, abs=1e-12)
    loss.backward()
    np.testing.assert_allclose(scores_B.grad.numpy(), slopes(loss_by_numpy, scores), rtol=1e-5, atol=1e-7)
    differences = [w - rejected for w, rejected in scores]
    np.testing.assert_allclose(found.metrics["preference/margin"], differences, rtol=1e-12)


def test_a_pair_of_equal_scores_is_half_right():
    found = reward_loss(torch.tensor([1.0, 1.0, 2.0, 1.0]), None, 0.0)
    assert found.metrics["preference/accuracy"].tolist() == [0.5, 1]
