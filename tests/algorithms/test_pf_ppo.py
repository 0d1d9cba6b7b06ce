"""What PF-PPO draws, against the weights of its paper, and what is made of rows that are drawn several times."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.algorithms.random_rows import SETTINGS, Rows

from spmdrl.algorithms.policy.pf_ppo import PfPpo
from spmdrl.algorithms.policy.ppo import Ppo
from spmdrl.algorithms.settings.actor_critic_configs import PfPpoConfig, PpoConfig
from spmdrl.nouns.batch import CreditInputs

RULES = ("best-random", "best-worst", "power")
REWARDS = st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0, float("nan")]), min_size=1, max_size=6)


def inputs_of(rewards: list[list[float]], seed: int = 3, step: int = 1, numbers: list[int] | None = None):
    """Rows of one token; `numbers` are those of the prompts."""
    lengths = [len(group) for group in rewards]
    rows = Rows.drawn([1] * sum(lengths), seed=0)
    groups = np.repeat(range(len(rewards)) if numbers is None else numbers, lengths)
    flat = torch.tensor([reward for group in rewards for reward in group])
    return replace(
        rows.inputs(), rewards_B=flat, groups_B=torch.tensor(groups), settings=replace(SETTINGS, seed=seed), step=step
    )


def shares(rewards: np.ndarray, rule: str, power: float) -> np.ndarray:
    """The chance of each response to be the one that is drawn."""
    best, worst = rewards == rewards.max(), rewards == rewards.min()
    weights = {
        "best-random": np.where(best, 0.4, 0.1),
        "best-worst": np.where(best | worst, 1.0, 0.0),
        "power": np.abs(rewards) ** power,
    }[rule]
    return weights / weights.sum() if weights.sum() else np.full(len(rewards), 1 / len(rewards))


@pytest.mark.parametrize("rule", RULES)
@given(st.lists(REWARDS, min_size=1, max_size=4))
@settings(max_examples=40)
def test_as_many_are_drawn_as_a_prompt_has_scored_ones_and_none_without_weight(rule, rewards):
    copies = PfPpo(PfPpoConfig(filter=rule)).copies(inputs_of(rewards)).tolist()
    for group in rewards:
        own, copies = np.array(copies[: len(group)]), copies[len(group) :]
        scored = ~np.isnan(group)
        assert own.sum() == scored.sum() and not own[~scored].any()
        if scored.any():
            assert not own[scored][shares(np.array(group)[scored], rule, 2.0) == 0].any()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("scope", ["prompt", "batch"])
def test_over_many_steps_rows_are_drawn_as_often_as_their_weights_say(rule, scope):
    rewards = [[0.5, 2.0, -1.0, 1.0, 0.5], [0.0, 1.5, 1.5]]
    power = {"filter_power": 1.5} if rule == "power" else {}
    algorithm, inputs = PfPpo(PfPpoConfig(filter=rule, filter_scope=scope, **power)), inputs_of(rewards)
    num_steps = 600
    found = sum(algorithm.copies(replace(inputs, step=step)) for step in range(num_steps)).numpy() / num_steps
    compared = rewards if scope == "prompt" else [sum(rewards, [])]
    expected = np.concatenate([len(group) * shares(np.array(group), rule, 1.5) for group in compared])
    # Five standard deviations of a mean of draws.
    np.testing.assert_allclose(found, expected, atol=5 * np.sqrt(8 / 4 / num_steps))


def test_a_prompts_draw_depends_on_the_seed_the_step_and_its_number_alone():
    algorithm, rewards = PfPpo(PfPpoConfig()), [0.5, 2.0, -1.0, 1.0, 0.5, 0.1, 0.2, 0.3]
    together = algorithm.copies(inputs_of([rewards, rewards, rewards])).view(3, -1)
    assert len({tuple(row) for row in together.tolist()}) == 3, "equal rewards of other prompts are drawn anew"
    assert torch.equal(algorithm.copies(inputs_of([rewards, rewards], numbers=[0, 2])).view(2, -1), together[[0, 2]])
    for draw in ({"step": 2}, {"seed": 4}):
        assert not torch.equal(algorithm.copies(inputs_of([rewards] * 3, **draw)).view(3, -1), together)


def test_rows_that_are_not_drawn_are_filtered_and_unscored_ones_have_a_reason_of_their_own():
    algorithm = PfPpo(PfPpoConfig(filter="best-worst"))
    inputs = inputs_of([[0.0, 0.5, 1.0, float("nan")], [0.5, 0.25, 0.0]])
    inputs.columns.put_dense("copies", algorithm.copies(inputs))
    left_out = algorithm.select(inputs)
    assert left_out["no_reward"].tolist() == [False, False, False, True, False, False, False]
    assert left_out["filtered"][[1, 5]].all() and not (left_out["filtered"] & left_out["no_reward"]).any()
    kept = ~left_out["filtered"] & ~left_out["no_reward"]
    assert int(inputs.columns.dense("copies")[kept].sum()) == 6


@given(st.lists(st.integers(1, 5), min_size=2, max_size=8), st.integers(0, 99), st.sampled_from(["biased", "unbiased"]))
@settings(max_examples=30)
def test_advantages_are_those_of_ppo_on_the_rows_as_often_as_they_were_drawn(lengths, seed, std):
    inputs = Rows.drawn(lengths, seed).inputs()
    index = torch.arange(len(lengths)).repeat_interleave(inputs.columns.dense("copies"))
    several: CreditInputs = inputs.of_rows(index)
    of_copies = Ppo(PpoConfig(std=std)).advantages(several).split(several.lengths_B.tolist())
    expected = dict(zip(index.tolist(), of_copies, strict=True))
    found = PfPpo(PfPpoConfig(std=std)).advantages(inputs).split(lengths)
    for row, advantages in enumerate(found):
        torch.testing.assert_close(advantages, expected[row], rtol=1e-12, atol=1e-12)


def test_a_power_that_no_rule_reads_is_refused():
    with pytest.raises(ValueError, match="set algo.filter to power, or leave algo.filter_power out"):
        PfPpoConfig(filter_power=3.0)
    PfPpoConfig(filter="power", filter_power=3.0)
