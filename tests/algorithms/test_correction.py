"""The weights of off-policy tokens against numpy in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.algorithms import random_rows
from tests.algorithms.random_rows import Rows

from spmdrl.algorithms.policy.grpo import Grpo
from spmdrl.algorithms.policy.ppo import Ppo
from spmdrl.algorithms.settings.actor_critic_configs import PpoConfig
from spmdrl.algorithms.settings.policy_configs import GrpoConfig
from spmdrl.algorithms.terms.correction import correction_rule
from spmdrl.nouns.batch import TokenTerms

ROWS = st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=6), min_size=1, max_size=5)


def weights_by_numpy(kind: str, clip: tuple[float, ...], rows: list[list[float]], total=np.mean) -> np.ndarray:
    """The definitions, row by row."""
    out = []
    for row in rows:
        ratio = np.exp(np.asarray(row, dtype=np.float64))
        if kind == "importance":
            out.append(ratio)
        elif kind == "tis":
            out.append(np.minimum(ratio, clip[0]))
        elif kind == "icepop":
            out.append(np.where((ratio >= clip[0]) & (ratio <= clip[1]), ratio, 0.0))
        else:
            mean = np.exp(total(row))
            out.append(np.minimum(ratio, clip[2]) * (clip[0] <= mean <= clip[1]))
    return np.concatenate(out)


def packed(rows: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor, int]:
    values = [value for row in rows for value in row]
    row_R = torch.arange(len(rows)).repeat_interleave(torch.tensor([len(row) for row in rows]))
    return torch.tensor(values, dtype=torch.float64), row_R, len(rows)


@pytest.mark.parametrize(
    ("kind", "clip"), [("importance", ()), ("tis", (1.5,)), ("icepop", (0.6, 1.7)), ("seq-mask-tis", (0.6, 1.7, 1.3))]
)
@given(ROWS)
@settings(max_examples=40)
def test_weights_follow_their_definition(kind, clip, rows):
    correction = correction_rule(kind, clip)(*packed(rows))
    expected = weights_by_numpy(kind, clip, rows)
    np.testing.assert_allclose(correction.weights_R.numpy(), expected, rtol=1e-12, atol=0)
    assert np.array_equal(correction.masked_R.numpy() == 1, expected == 0)
    is_capped = expected == clip[-1] if "tis" in kind else np.zeros_like(expected)
    assert np.array_equal(correction.clipped_R.numpy() == 1, is_capped)


@given(ROWS)
@settings(max_examples=40)
def test_the_product_of_a_row_takes_the_place_of_its_mean(rows):
    clip = (0.6, 1.7, 1.3)
    correction = correction_rule("seq-mask-tis", clip, "sum")(*packed(rows))
    expected = weights_by_numpy("seq-mask-tis", clip, rows, total=np.sum)
    np.testing.assert_allclose(correction.weights_R.numpy(), expected, rtol=1e-12, atol=0)


def test_a_ratio_over_rows_needs_a_rule_over_rows():
    with pytest.raises(ValueError, match="set algo.rollout_is to seq-mask-tis"):
        GrpoConfig(rollout_is="tis", rollout_is_sequence="sum")


@pytest.mark.parametrize("kind", ["importance", "tis", "icepop", "seq-mask-tis"])
def test_tokens_that_both_engines_rate_alike_keep_their_weight(kind):
    correction = correction_rule(kind, None)(*packed([[0.0, 0.0], [0.0]]))
    assert correction.weights_R.tolist() == [1.0, 1.0, 1.0]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 999))
@settings(max_examples=30)
def test_importance_weights_make_ppo_the_decoupled_objective(lengths, seed):
    """J = E[pi_prox / pi_behav min(u A, clip(u, 1 - e, 1 + e) A)], u = pi_theta / pi_prox (arXiv:2505.24298, Eq. 5).

    pi_behav generated, pi_prox is the policy that the step began with, pi_theta the one that is trained.
    """
    rows = Rows.drawn(lengths, seed)
    advantages = [3 * row for row in rows.values]
    behav, prox, weight = (np.concatenate(part) for part in (rows.rollout, rows.old, advantages))

    def loss(policy: list[np.ndarray]) -> float:
        u = np.exp(np.concatenate(policy) - prox)
        return -(np.exp(prox - behav) * np.minimum(u * weight, u.clip(0.8, 1.2) * weight)).mean()

    policy_R = random_rows.packed(rows.policy).requires_grad_()
    terms = rows.terms(policy_R, advantages)
    found = Ppo(PpoConfig(rollout_is="importance")).loss(terms).loss_R.mean()
    assert found.item() == pytest.approx(loss(rows.policy), rel=1e-12, abs=1e-14)
    gradient = torch.autograd.grad(found, policy_R)[0].numpy()
    np.testing.assert_allclose(gradient, random_rows.slopes(loss, rows.policy), rtol=1e-5, atol=1e-8)


def test_decoupled_and_ordinary_ppo_differ_where_a_ratio_is_clipped():
    rows = Rows.drawn([6] * 8, seed=0)
    terms = rows.terms(random_rows.packed(rows.policy), [3 * row for row in rows.values])
    decoupled = Ppo(PpoConfig(rollout_is="importance")).loss(terms).loss_R.mean()
    around_generator = {**terms.columns, "old_logprobs": terms.columns["rollout_logprobs"]}
    ordinary = Ppo(PpoConfig()).loss(replace(terms, columns=around_generator)).loss_R.mean()
    assert abs(ordinary - decoupled) > 0.01


def test_a_long_row_is_not_dropped_for_being_long():
    rule = correction_rule("seq-mask-tis", (0.5, 2.0, 2.0))
    # The product of the ratios is e^20.
    assert rule(*packed([[0.1] * 200])).masked_R.sum() == 0
    assert rule(*packed([[1.0] * 3])).masked_R.sum() == 3


def terms(**columns: torch.Tensor) -> TokenTerms:
    logprobs_R = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    given_columns = {"advantages": torch.tensor([1.0, 1.0, -2.0]), **columns}
    return TokenTerms(logprobs_R, torch.zeros(3), given_columns, torch.tensor([0, 0, 1]), 2)


def test_the_only_update_weighs_the_policy_gradient_by_its_own_logprobs():
    rollout = torch.tensor([-1.0, -2.5, -2.5])
    given_terms = terms(rollout_logprobs=rollout)
    loss = Grpo(GrpoConfig(rollout_is="tis", rollout_is_clip=2.0)).loss(given_terms)
    loss.loss_R.sum().backward()
    weights = np.minimum(np.exp([0.0, 0.5, 2.0]), 2.0)
    np.testing.assert_allclose(given_terms.logprobs_R.grad.numpy(), -weights * [1.0, 1.0, -2.0], rtol=1e-6)
    assert loss.metrics["rollout_is/clipped_share"].tolist() == [0.0, 0.0, 1.0]


def test_later_updates_weigh_by_the_logprobs_that_the_step_began_with():
    old, rollout = torch.tensor([-1.1, -2.0, -0.7]), torch.tensor([-1.0, -2.5, -0.7])
    plain = Grpo(GrpoConfig()).loss(terms(old_logprobs=old))
    weighted = Grpo(GrpoConfig(rollout_is="icepop")).loss(terms(old_logprobs=old, rollout_logprobs=rollout))
    expected = plain.loss_R.detach().numpy() * np.exp((old - rollout).numpy())
    np.testing.assert_allclose(weighted.loss_R.detach().numpy(), expected, rtol=1e-6)


def test_a_kl_term_is_not_weighted():
    columns = {"rollout_logprobs": torch.full((3,), -20.0), "ref_logprobs": torch.tensor([-1.5, -2.5, -1.0])}
    masked = Grpo(GrpoConfig(rollout_is="icepop", kl_coef=0.1, kl_estimator="k2")).loss(terms(**columns))
    np.testing.assert_allclose(masked.loss_R.detach().numpy(), [0.0125, 0.0125, 0.0125], rtol=1e-5)


def test_the_generators_logprobs_are_read_only_where_they_are_used():
    assert "rollout_logprobs" not in Grpo(GrpoConfig()).columns_for_loss(1)
    assert "rollout_logprobs" in Grpo(GrpoConfig(rollout_is="tis")).columns_for_loss(1)


@pytest.mark.parametrize(
    ("kind", "clip"),
    [("none", 2.0), ("tis", 0.0), ("tis", (0.5, 2.0)), ("icepop", 2.0), ("icepop", (2.0, 0.5)),
     ("icepop", (-0.5, 2.0)), ("seq-mask-tis", (0.5, 2.0)), ("seq-mask-tis", (0.5, 2.0, 0.0))],
)  # fmt: skip
def test_bounds_that_do_not_fit_the_rule_are_refused(kind, clip):
    with pytest.raises(ValueError, match="algo.rollout_is_clip is"):
        GrpoConfig(rollout_is=kind, rollout_is_clip=clip)
