"""DAPO's dynamic sampling and overlong shaping against their equations in numpy, in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.algorithms.random_rows import MAX_LENGTH, Rows

from spmdrl.algorithms.policy.dapo import Dapo
from spmdrl.algorithms.settings.policy_configs import DapoConfig

LENGTHS = st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=12)


@pytest.mark.parametrize("cache", [0, 1, 3, MAX_LENGTH, None])
@given(LENGTHS, st.integers(0, 999))
@settings(max_examples=20)
def test_rewards_fall_by_length_in_the_last_tokens_before_the_longest(cache, lengths, seed):
    """0 up to Lmax - Lcache; then ((Lmax - Lcache) - |y|) / Lcache, up to Lmax (Eq. 13)."""
    rows = Rows.drawn(lengths, seed)
    soft = MAX_LENGTH // 5 if cache is None else cache
    begin = MAX_LENGTH - soft
    shaped = [
        reward + (0.0 if length <= begin else (begin - length) / soft)
        for reward, length in zip(rows.rewards, lengths, strict=True)
    ]
    expected = []
    for row, reward in enumerate(shaped):
        group = np.array([shaped[other] for other in rows.members(row)])
        expected.append(0.0 if len(group) == 1 else (reward - group.mean()) / (group.std(ddof=1) + 1e-4))
    found = Dapo(DapoConfig(overlong_cache=cache)).advantages(rows.inputs())
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-12)


@given(LENGTHS, st.integers(0, 999), st.data())
def test_groups_with_an_accuracy_of_0_or_1_are_left_out_whatever_their_lengths(lengths, seed, data):
    """0 < |{i : o_i is right}| < G (Eq. 11), of the responses that have a reward."""
    rows = Rows.drawn(lengths, seed)
    drawn = data.draw(st.lists(st.sampled_from([1.0, -1.0, None]), min_size=len(lengths), max_size=len(lengths)))
    rewards = np.array([np.nan if reward is None else reward for reward in drawn])
    expected: dict[str, list[bool]] = {"no_reward": [], "all_right": [], "all_wrong": []}
    for row, reward in enumerate(drawn):
        scored = [drawn[other] for other in rows.members(row) if drawn[other] is not None]
        num_right = scored.count(1.0)
        expected["no_reward"].append(reward is None)
        expected["all_right"].append(reward is not None and num_right == len(scored))
        expected["all_wrong"].append(reward is not None and num_right == 0)
    by_reward = Dapo(DapoConfig()).select(replace(rows, rewards=rewards).inputs(torch.float32))
    assert {reason: left_out.tolist() for reason, left_out in by_reward.items()} == expected

    # The same values as those of one function, beside rewards that differ but for where there is none.
    inputs = replace(rows, rewards=np.where(np.isnan(rewards), np.nan, rows.rewards)).inputs()
    inputs.columns.values("reward_parts")[1::2] = torch.tensor(rewards)
    by_function = Dapo(DapoConfig(filter_on="second"))
    assert "reward_parts" in by_function.columns_for_credit() - Dapo(DapoConfig()).columns_for_credit()
    left_out = by_function.select(inputs)
    assert {reason: left_out.tolist() for reason, left_out in left_out.items()} == expected


def test_a_graded_reward_is_filtered_where_all_responses_have_the_same_one():
    rows = replace(Rows.drawn([2] * 4, 0), groups=[0, 0, 1, 1], rewards=np.array([0.5, 0.5, 0.5, 0.4]))
    left_out = Dapo(DapoConfig()).select(rows.inputs(torch.float32))
    assert left_out["all_right"].tolist() == [True, True, False, False] and not left_out["all_wrong"].any()


def test_rows_that_no_function_judged_are_filtered_by_their_reward():
    rows = replace(Rows.drawn([2] * 4, 0), groups=[0, 0, 1, 1], rewards=np.array([1.0, 0.0, 1.0, 1.0]))
    inputs = rows.inputs()
    inputs.columns.values("reward_parts").fill_(torch.nan)
    left_out = Dapo(DapoConfig(filter_on="first")).select(inputs)
    assert left_out["all_right"].tolist() == [False, False, True, True]
