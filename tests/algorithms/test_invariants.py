"""What holds for every algorithm of the table: it need only be registered to be tested here.

A batch may be cut into micro-batches and over ranks, and its rows may lie in any order; equal rewards teach nothing.
What an environment writes between tokens is in tests/dataflow/stages/test_model_tokens.py; whole updates, packed and
over ranks, are in tests/dataflow/stages/test_every_algorithm.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.algorithms.random_rows import MAX_LENGTH, Rows, packed, per_token

from spmdrl.algorithms.algorithm import Algorithm
from spmdrl.algorithms.table import ALGORITHMS, build_algorithm
from spmdrl.nouns.batch import CreditInputs, LossScope, TokenTerms

ALL = [pytest.param(build_algorithm(config()), id=config().name) for config in ALGORITHMS]
WITH_KL = [
    pytest.param(build_algorithm(replace(config(), kl_coef=0.1)), id=f"{config().name}, kl") for config in ALGORITHMS
]
# Their papers take a reward of 0 for a wrong answer.
RELATIVE_TO_0 = {"maxrl"}
LENGTHS = st.lists(st.integers(1, 5), min_size=2, max_size=10)


def advantages_of(algorithm: Algorithm, inputs: CreditInputs) -> list[np.ndarray]:
    """One array per row, of one value per token."""
    found = per_token(algorithm.advantages(inputs), inputs)
    return np.split(found, inputs.lengths_B.cumsum(0)[:-1].numpy())


def loss_of(algorithm: Algorithm, terms: TokenTerms, scope: LossScope) -> torch.Tensor:
    lengths_B = terms.row_of_token_R.bincount(minlength=terms.num_rows)
    return (algorithm.token_weights(lengths_B, scope) * algorithm.loss(terms).loss_R).sum()


def scope_of(rows: Rows) -> LossScope:
    return LossScope(sum(rows.lengths), len(rows.lengths), MAX_LENGTH)


def kept(algorithm: Algorithm, rows: Rows) -> Rows:
    """The rows that the algorithm trains on."""
    none_B = torch.zeros(len(rows.groups), dtype=torch.bool)
    left_out_B = torch.stack([none_B, *algorithm.select(rows.inputs()).values()]).any(0)
    left = picked(rows, (~left_out_B).nonzero().flatten().tolist())
    assume(left.lengths)
    return left


def picked(rows: Rows, places: list[int]) -> Rows:
    lists = {
        name: [getattr(rows, name)[place] for place in places]
        for name in ("groups", "policy", "old", "rollout", "reference", "values", "returns", "teacher")
    }
    return Rows(rewards=rows.rewards[places], **lists)


@pytest.mark.parametrize("algorithm", ALL + WITH_KL)
@given(LENGTHS, st.integers(0, 999), st.data())
@settings(max_examples=10)
def test_a_batch_cut_into_any_parts_has_one_loss_and_one_gradient(algorithm, lengths, seed, data):
    rows = kept(algorithm, Rows.drawn(lengths, seed))
    lengths, size = rows.lengths, algorithm.unit_size
    advantages = advantages_of(algorithm, rows.inputs())
    num_units = len(lengths) // size
    part_of_unit = data.draw(st.lists(st.integers(0, 2), min_size=num_units, max_size=num_units))
    parts = [[row for row in range(len(lengths)) if part_of_unit[row // size] == part] for part in range(3)]

    whole_R = packed(rows.policy).requires_grad_()
    whole = loss_of(algorithm, rows.terms(whole_R, advantages), scope_of(rows))
    gradient_of_row = torch.autograd.grad(whole, whole_R)[0].split(lengths)
    total = 0.0
    for places in filter(None, parts):
        part = picked(rows, places)
        part_R = packed(part.policy).requires_grad_()
        loss = loss_of(algorithm, part.terms(part_R, [advantages[place] for place in places]), scope_of(rows))
        total += loss.item()
        expected_R = torch.cat([gradient_of_row[place] for place in places])
        torch.testing.assert_close(torch.autograd.grad(loss, part_R)[0], expected_R, rtol=1e-12, atol=1e-14)
    assert total == pytest.approx(whole.item(), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("algorithm", ALL + WITH_KL)
@given(LENGTHS, st.integers(0, 999), st.randoms(use_true_random=False))
@settings(max_examples=10)
def test_rows_in_another_order_keep_their_advantages_and_the_loss(algorithm, lengths, seed, random):
    rows, size = kept(algorithm, Rows.drawn(lengths, seed)), algorithm.unit_size
    units = random.sample(range(len(rows.lengths) // size), len(rows.lengths) // size)
    order = [unit * size + place for unit in units for place in random.sample(range(size), size)]
    moved = picked(rows, order)
    advantages, of_moved = advantages_of(algorithm, rows.inputs()), advantages_of(algorithm, moved.inputs())
    for place, row in enumerate(order):
        np.testing.assert_allclose(of_moved[place], advantages[row], rtol=1e-9, atol=1e-9)
    losses = [
        loss_of(algorithm, some.terms(packed(some.policy), found), scope_of(rows)).item()
        for some, found in ((rows, advantages), (moved, of_moved))
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("algorithm", [case for case in ALL if case.id not in RELATIVE_TO_0])
@given(LENGTHS, st.integers(0, 999))
@settings(max_examples=10)
def test_the_same_amount_more_for_every_response_changes_nothing(algorithm, lengths, seed):
    rows = Rows.drawn(lengths, seed)
    inputs, more = rows.inputs(), replace(rows, rewards=rows.rewards + 2.5).inputs()
    for before, after in zip(advantages_of(algorithm, inputs), advantages_of(algorithm, more), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("algorithm", ALL)
@given(LENGTHS, st.integers(0, 999), st.sampled_from([0.0, 0.1, 1.0, -3.7]))
@settings(max_examples=10)
def test_equal_rewards_of_a_group_give_advantages_of_exactly_zero(algorithm, lengths, seed, reward):
    rows = Rows.drawn(lengths, seed)
    # Where rewards are compared over the batch, all of it is equal.
    if not algorithm.columns_for_credit().isdisjoint({"values", "returns", "teacher_logprobs"}):
        pytest.skip("its advantages compare with a critic's values or a teacher's log-probs")
    if algorithm.num_likeliest:
        pytest.skip("it learns from a teacher's distribution, whatever the rewards")
    is_equal = np.array([group == rows.groups[0] or algorithm.min_responses == 1 for group in rows.groups])
    # In float32, as rewards come.
    inputs = replace(rows, rewards=np.where(is_equal, reward, rows.rewards)).inputs(torch.float32)
    for row, found in enumerate(advantages_of(algorithm, inputs)):
        assert not is_equal[row] or not found.any(), (row, found)
