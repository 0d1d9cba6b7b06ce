"""Advantages against their equations in numpy: one function per equation, from a whole batch of ragged rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.algorithms.random_rows import PART_WEIGHTS, SETTINGS, Rows, per_token

from spmdrl.algorithms.policy.gdpo import Gdpo
from spmdrl.algorithms.policy.opd import Opd
from spmdrl.algorithms.policy.ppo import Ppo
from spmdrl.algorithms.settings.actor_critic_configs import PpoConfig
from spmdrl.algorithms.settings.distillation_configs import OpdConfig
from spmdrl.algorithms.settings.policy_configs import (
    CispoConfig,
    DppoConfig,
    DrGrpoConfig,
    GdpoConfig,
    GrpoConfig,
    GspoConfig,
    ReinforcePpBaselineConfig,
    ReinforcePpConfig,
    RlooConfig,
    SapoConfig,
)
from spmdrl.algorithms.table import build_algorithm
from spmdrl.nouns.batch import Batch, CreditInputs

LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=10)


def tokens(rows: Rows, values: list[float]) -> np.ndarray:
    return np.repeat(values, rows.lengths)


def group_relative(rows: Rows, config) -> np.ndarray:
    """(R - mean) / (std + epsilon)."""
    out = []
    for row, reward in enumerate(rows.rewards):
        group = rows.rewards[rows.members(row)]
        compared = rows.rewards if config.scale_rewards == "batch" else group
        ddof = int(config.std == "unbiased" and len(compared) > 1)
        scale = 1.0 if config.scale_rewards == "none" else compared.std(ddof=ddof) + config.std_epsilon
        out.append(0.0 if len(group) == 1 else (reward - group.mean()) / scale)
    return tokens(rows, out)


def leave_one_out(rows: Rows, config) -> np.ndarray:
    """R_i - mean of the others' R_j."""
    out = []
    for row, reward in enumerate(rows.rewards):
        others = [rows.rewards[other] for other in rows.members(row) if other != row]
        out.append(reward - np.mean(others) if others else 0.0)
    return tokens(rows, out)


def returns_whitened(rows: Rows, config) -> np.ndarray:
    """R - beta sum over later tokens of k1, less the mean over all tokens, over their standard deviation."""
    out = []
    for row, reward in enumerate(rows.rewards):
        kl = rows.kl(row)
        out += [reward - config.kl_coef * kl[place:].sum() for place in range(kl.size)]
    return whitened(np.asarray(out), config)


def baseline_whitened(rows: Rows, config) -> np.ndarray:
    """R - mean of the group, over the standard deviation of the batch."""
    centred = [reward - rows.rewards[rows.members(row)].mean() for row, reward in enumerate(rows.rewards)]
    if config.whiten_over == "tokens":
        return whitened(tokens(rows, centred), config)
    return tokens(rows, whitened(np.asarray(centred), config))


def less_values(rows: Rows, config) -> np.ndarray:
    """G - V, less the mean over all tokens, over their standard deviation."""
    return whitened(np.concatenate(rows.returns) - np.concatenate(rows.values), config)


def to_teacher(rows: Rows, config) -> np.ndarray:
    """log p_teacher - log p_generator + b (R - mean) / (std + epsilon), less a token's and all later KL terms."""
    distance = np.concatenate(rows.teacher) - np.concatenate(rows.rollout)
    later = [rows.kl(row)[place:].sum() for row, length in enumerate(rows.lengths) for place in range(length)]
    of_rewards = config.reward_coef * group_relative(rows, config) if config.reward_coef else 0.0
    return distance + of_rewards - config.kl_coef * np.asarray(later)


def whitened(values: np.ndarray, config) -> np.ndarray:
    ddof = int(config.std == "unbiased" and values.size > 1)
    deviation = values.std(ddof=ddof) if values.size > 1 else 0.0
    return (values - values.mean()) / (deviation + 1e-8)


CASES = [
    (GrpoConfig(), group_relative),
    (GrpoConfig(std="biased", std_epsilon=1e-6), group_relative),
    (GrpoConfig(scale_rewards="batch"), group_relative),
    (DrGrpoConfig(), group_relative),
    (GspoConfig(), group_relative),
    (CispoConfig(), group_relative),
    (SapoConfig(), group_relative),
    (DppoConfig(), group_relative),
    (RlooConfig(), leave_one_out),
    (PpoConfig(), less_values),
    (PpoConfig(std="biased"), less_values),
    (OpdConfig(), to_teacher),
    (OpdConfig(reward_coef=2.0), to_teacher),
    (OpdConfig(kl_coef=0.2, kl_in="advantage", kl_estimator="k1"), to_teacher),
    (ReinforcePpConfig(kl_coef=0.3), returns_whitened),
    (ReinforcePpConfig(std="biased"), returns_whitened),
    (ReinforcePpBaselineConfig(), baseline_whitened),
    (ReinforcePpBaselineConfig(whiten_over="tokens"), baseline_whitened),
]


@pytest.mark.parametrize(("config", "equation"), CASES)
@given(LENGTHS, st.integers(0, 999))
@settings(max_examples=30)
def test_advantages_are_those_of_the_equations(config, equation, lengths, seed):
    rows = Rows.drawn(lengths, seed)
    inputs = rows.inputs()
    found = per_token(build_algorithm(config).advantages(inputs), inputs)
    # Of a single value the deviation is 0, and what rounding leaves of it is divided by 1e-8.
    np.testing.assert_allclose(found, equation(rows, config), rtol=1e-12, atol=1e-12 if len(lengths) > 1 else 1e-7)


@given(LENGTHS, st.integers(0, 999))
def test_ppo_lowers_each_tokens_reward_by_its_kl_term(lengths, seed):
    rows = Rows.drawn(lengths, seed)
    expected = []
    for row, reward in enumerate(rows.rewards):
        expected += (np.append(np.zeros(lengths[row] - 1), reward) - 0.3 * rows.kl(row)).tolist()
    algorithm = Ppo(PpoConfig(kl_coef=0.3))
    assert algorithm.columns_for_returns() == {"ref_logprobs", "rollout_logprobs"}
    np.testing.assert_allclose(algorithm.token_rewards(rows.inputs()).numpy(), expected, rtol=1e-12, atol=1e-15)
    in_loss = Ppo(PpoConfig(kl_coef=0.3, kl_in="loss", kl_estimator="k3"))
    assert in_loss.columns_for_returns() == set() and "ref_logprobs" in in_loss.columns_for_loss(1)


@pytest.mark.parametrize("config", [GdpoConfig(), GdpoConfig(whiten_over="tokens", std="biased", std_epsilon=1e-6)])
@given(LENGTHS, st.integers(0, 999))
def test_gdpo_compares_each_functions_rewards_and_normalises_their_weighted_sum(config, lengths, seed):
    """sum over k of w_k (R_k - mean R_k) / (std R_k + epsilon), over the standard deviation of the batch."""
    rows, parts = Rows.drawn(lengths, seed), np.random.default_rng(seed).normal(size=(2, len(lengths)))
    rows = replace(rows, rewards=np.asarray(PART_WEIGHTS) @ parts)
    inputs, starts = rows.inputs(), np.append(0, np.cumsum(lengths)[:-1])
    inputs.columns.values("reward_parts").copy_(torch.tensor(parts.T).flatten())
    compared = [group_relative(replace(rows, rewards=part), config)[starts] for part in parts]
    total = np.asarray(PART_WEIGHTS) @ compared
    over_rows = config.whiten_over == "rows"
    expected = tokens(rows, whitened(total, config)) if over_rows else whitened(tokens(rows, total), config)
    found = per_token(Gdpo(config).advantages(inputs), inputs)
    # What rounding leaves of values that are all 0 is divided by 1e-8.
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-7 if not total.any() else 1e-9)


def gdpo_advantages(parts_BK: list[list[float]], rewards: list[float], groups: list[int]) -> list[float]:
    columns = Batch.of_rows(range(len(groups)))
    columns.put_lists("reward_parts", parts_BK, torch.float32)
    lengths_B, groups_B = torch.ones(len(groups), dtype=torch.int64), torch.tensor(groups)
    inputs = CreditInputs(torch.tensor(rewards), groups_B, lengths_B, columns, SETTINGS)
    return Gdpo(GdpoConfig(std_epsilon=0.0)).advantages(inputs).double().tolist()


def test_gdpo_compares_a_functions_values_among_the_rows_that_have_one():
    none, (first, second) = float("nan"), PART_WEIGHTS
    parts = [[0.0, none], [1.0, none], [none, 0.0], [none, 1.0], [1.0, 0.0], [0.0, none]]
    rewards = [float(np.nansum(np.asarray(PART_WEIGHTS) * part)) for part in parts]
    found = gdpo_advantages(parts, rewards, [0, 0, 1, 1, 2, 2])
    expected = whitened(np.asarray([-first, first, -second, second, first, -first]) * 0.5**0.5, GdpoConfig())
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("model_score", [float("nan"), 0.25])
def test_gdpo_compares_whole_rewards_in_a_group_that_an_environment_rewarded(model_score):
    """No function has a value of such a row, but a reward model may: its score is a part of the reward."""
    none, (_, weight) = float("nan"), PART_WEIGHTS
    added = weight * float(np.nan_to_num(model_score))
    parts = [[none, model_score]] * 3 + [[1.0, 2.0], [2.0, 1.0]]
    rewards = [added, added + 1, added + 3, *(float(np.dot(PART_WEIGHTS, part)) for part in parts[3:])]
    found = gdpo_advantages(parts, rewards, [0, 0, 0, 1, 1])
    assert np.isfinite(found).all()
    np.testing.assert_allclose((found[2] - found[0]) / (found[1] - found[0]), 3, rtol=1e-5)
    alone = gdpo_advantages([[none, none]] * 2, [0.0, 0.0], [0, 0])
    assert alone == [0.0, 0.0]


def test_a_teacher_alone_learns_from_rows_without_a_reward():
    inputs = replace(Rows.drawn([2, 3], 1).inputs(), rewards_B=torch.tensor([float("nan"), 1.0]))
    assert not Opd(OpdConfig()).select(inputs) and Opd(OpdConfig()).advantages(inputs).isfinite().all()
    assert Opd(OpdConfig(reward_coef=1.0)).select(inputs)["no_reward"].tolist() == [True, False]


@given(st.integers(0, 999))
@settings(max_examples=5)
def test_the_expected_gradient_of_sampled_distances_is_that_of_the_reverse_kl(seed):
    """Sum over a of p(a) A(a) d log p(a), of which samples are an estimate, is -d KL(p || teacher)."""
    rng = np.random.default_rng(seed)
    logits, teacher = (torch.tensor(rng.normal(size=6)) for _ in range(2))
    policy, teacher = logits.requires_grad_().log_softmax(-1), teacher.log_softmax(-1)
    columns = Batch.of_rows(range(6))
    offsets = torch.arange(7)
    columns.put_ragged("rollout_logprobs", policy.detach(), offsets)
    columns.put_ragged("teacher_logprobs", teacher, offsets)
    inputs = CreditInputs(torch.zeros(6), torch.arange(6), torch.ones(6, dtype=torch.int64), columns, SETTINGS)
    advantages = Opd(OpdConfig()).advantages(inputs)
    (sampled,) = torch.autograd.grad((-advantages * policy.detach().exp() * policy).sum(), logits, retain_graph=True)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits)
    torch.testing.assert_close(sampled, exact, rtol=1e-12, atol=1e-14)
