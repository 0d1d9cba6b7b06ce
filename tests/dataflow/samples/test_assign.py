from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdrl.dataflow.samples.assign import Taker, TokenCost, assign_rows

GROUP_SIZE = 3


@st.composite
def problems(draw):
    num_nodes = draw(st.integers(1, 3))
    takers = [Taker(rank, rank // 2) for rank in range(2 * num_nodes)]
    num_groups = draw(st.integers(0, 8))
    group_homes = draw(st.lists(st.integers(0, num_nodes - 1), min_size=num_groups, max_size=num_groups))
    homes = [home for home in group_homes for _ in range(GROUP_SIZE)]
    costs = draw(st.lists(st.integers(1, 1000), min_size=len(homes), max_size=len(homes)))
    return list(range(len(homes))), homes, costs, takers


@given(problems(), st.sampled_from([None, GROUP_SIZE]))
def test_every_row_is_assigned_exactly_once_and_groups_stay_whole(problem, group_size):
    rows, homes, costs, takers = problem
    shares = assign_rows(rows, homes, costs, takers, group_size)
    assert len(shares) == len(takers)
    assert sorted(row for share in shares for row in share) == rows
    assert all(share == sorted(share) for share in shares)
    if group_size:
        groups = [{row // group_size for row in share} for share in shares]
        assert sum(map(len, groups)) == len(set().union(*groups))


@given(problems(), st.randoms())
def test_the_order_in_which_rows_are_named_makes_no_difference(problem, random):
    rows, homes, costs, takers = problem
    shuffled = list(zip(rows, homes, costs, strict=True))
    random.shuffle(shuffled)
    again = [list(column) for column in zip(*shuffled, strict=True)] or [[], [], []]
    assert assign_rows(*again, takers) == assign_rows(rows, homes, costs, takers)


@given(problems())
def test_no_taker_carries_more_than_the_mean_its_slack_and_one_row(problem):
    rows, homes, costs, takers = problem
    loads = [sum(costs[row] for row in share) for share in assign_rows(rows, homes, costs, takers)]
    assert max(loads) <= sum(costs) / len(takers) * 1.05 + max(costs, default=0)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5))
def test_rows_stay_at_home_when_nodes_carry_the_same(num_nodes, ranks_per_node, rows_per_rank):
    takers = [Taker(rank, rank // ranks_per_node) for rank in range(num_nodes * ranks_per_node)]
    rows = list(range(len(takers) * rows_per_rank))
    homes = [row % num_nodes for row in rows]
    shares = assign_rows(rows, homes, [7] * len(rows), takers)
    assert all(homes[row] == taker.node for taker, share in zip(takers, shares, strict=True) for row in share)
    assert {len(share) for share in shares} == {rows_per_rank}


def test_rows_cross_nodes_only_as_far_as_balance_needs():
    takers = [Taker(0, 0), Taker(1, 1)]
    shares = assign_rows(list(range(10)), [0] * 8 + [1] * 2, [10] * 10, takers)
    assert [len(share) for share in shares] == [5, 5]
    assert {8, 9} <= set(shares[1])


def test_ties_go_by_row_number():
    assert assign_rows([0, 1, 2, 3], [0] * 4, [5] * 4, [Taker(0, 0), Taker(1, 0)]) == [[0, 2], [1, 3]]


def test_rows_without_a_taker_at_home_are_shared_by_all():
    shares = assign_rows([0, 1], [3, 3], [1, 1], [Taker(0, 0), Taker(1, 1)])
    assert shares == [[0], [1]]


def test_no_taker_at_all_is_refused():
    with pytest.raises(ValueError, match="have no taker"):
        assign_rows([0], [0], [1], [])


def test_a_long_row_costs_more_than_its_tokens_in_short_rows():
    long, short = TokenCost().of(np.array([8192, 4096]))
    assert long > 2 * short
