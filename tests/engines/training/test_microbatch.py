from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdrl.engines.training.microbatch import RowCost, dummy_rows, fewest_microbatches, plan_microbatches
from spmdrl.engines.training.rows import TokenRows, to_microbatch
from spmdrl.types import offsets_of
from tests.engines.training.tiny import CONFIG, make_rows

COST = RowCost(per_token=10.0, per_token_squared=1.0)
LENGTHS = st.lists(st.integers(2, 40), max_size=30)


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(1, 100), st.integers(0, 5))
def test_every_row_runs_once_within_the_budget_in_the_agreed_count(lengths, max_tokens, extra):
    plan = plan_microbatches(lengths, max_tokens=max_tokens, cost=COST, agree=lambda count: count + extra)
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    for rows in plan:
        assert len(rows) <= 1 or sum(lengths[row] for row in rows) <= max_tokens
    assert len(plan) == len(fewest_microbatches(lengths, max_tokens=max_tokens, cost=COST)) + extra
    costs = [sum(COST.of(lengths[row]) for row in rows) for rows in plan]
    assert costs == sorted(costs, reverse=True)


def test_equal_rows_are_balanced_exactly():
    plan = plan_microbatches([8] * 12, max_tokens=32, cost=COST, agree=lambda count: count)
    assert [len(rows) for rows in plan] == [4, 4, 4]


def test_long_rows_weigh_more_than_their_tokens():
    plan = plan_microbatches([30] + [10] * 4, max_tokens=60, cost=COST, agree=lambda count: count)
    assert plan == [[0], [1, 2, 3, 4]]


def test_the_cost_of_a_model_counts_its_weights_and_its_attention():
    cost = RowCost.of_model(CONFIG)
    assert cost.per_token_squared == 2 * 4 * 4
    assert cost.per_token == 2 * (8 * 4 * 2 * (4 + 2) + 3 * 8 * 13) + 17 * 8


def test_a_microbatch_points_at_the_tokens_before_each_response_token():
    rows = TokenRows(torch.arange(10, 17), offsets_of([4, 3]), torch.tensor([2, 1]))
    micro = to_microbatch(rows, torch.device("cpu"))
    assert micro.targets_R.tolist() == [12, 13, 15, 16]
    assert micro.predicting_R.tolist() == [1, 2, 4, 5]
    assert micro.row_of_response_R.tolist() == [0, 0, 1, 1]
    assert micro.positions_T.tolist() == [0, 1, 2, 3, 0, 1, 2]


def test_selected_rows_carry_their_columns_and_know_where_they_came_from():
    rows = make_rows(5)
    picked = rows.select([3, 1])
    assert picked.dense["row"].tolist() == [3, 1]
    torch.testing.assert_close(picked.response["weights"], rows.response["weights"][rows.response_index([3, 1])])
    bounds = rows.offsets.tolist()
    assert picked.tokens_T.tolist() == rows.tokens_T[bounds[3] : bounds[4]].tolist() + (
        rows.tokens_T[bounds[1] : bounds[2]].tolist()
    )


def test_a_row_without_a_prompt_is_refused_by_name():
    with pytest.raises(ValueError, match="row 1 has a prompt of 0 tokens in 3"):
        TokenRows(torch.zeros(5, dtype=torch.int64), offsets_of([2, 3]), torch.tensor([1, 0]))


def test_a_column_of_another_size_is_refused_by_name():
    with pytest.raises(ValueError, match="'weights' holds 3 values, but these rows need 2"):
        TokenRows(torch.zeros(3).long(), offsets_of([3]), torch.tensor([1]), response={"weights": torch.ones(3)})


def test_the_dummy_has_one_response_token():
    assert dummy_rows().num_response_tokens == 1
