from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdrl.nouns.partition import RowCost, largest_differencing


def spread(groups: list[list[int]], values: list[int]) -> int:
    sums = [sum(values[index] for index in group) for group in groups]
    return max(sums) - min(sums)


def greedily_spread(values: list[int], count: int) -> list[list[int]]:
    """Each value, largest first, to the lightest group (Graham's rule)."""
    groups: list[list[int]] = [[] for _ in range(count)]
    for index in sorted(range(len(values)), key=lambda index: -values[index]):
        min(groups, key=lambda group: sum(values[member] for member in group)).append(index)
    return groups


def log_normal_values(seed: int, count: int) -> list[int]:
    return (1000 * np.random.default_rng(seed).lognormal(mean=5.5, sigma=0.8, size=count)).astype(int).tolist()


def test_values_are_spread_less_than_by_the_greedy_rule():
    ours, greedy = [], []
    for seed in range(40):
        costs = log_normal_values(seed, count=30 + seed)
        ours.append(spread(largest_differencing(costs, 4), costs))
        greedy.append(spread(greedily_spread(costs, 4), costs))
    assert sum(ours) < sum(greedy) / 2


@given(st.lists(st.integers(0, 10**9), max_size=25), st.integers(1, 30))
def test_differencing_puts_every_index_in_one_group(values, num_groups):
    groups = largest_differencing(values, num_groups)
    assert len(groups) == num_groups
    assert sorted(index for group in groups for index in group) == list(range(len(values)))


@given(st.lists(st.integers(1, 100), min_size=1, max_size=25), st.integers(1, 6))
def test_differencing_spreads_sums_by_at_most_the_largest_value(values, num_groups):
    assert spread(largest_differencing(values, num_groups), values) <= max(values)


@given(st.lists(st.integers(1, 100), min_size=200, max_size=600), st.integers(2, 4))
def test_so_do_many_values_of_which_the_small_ones_are_placed_in_parts(values, num_groups):
    groups = largest_differencing(values, num_groups)
    assert sorted(index for group in groups for index in group) == list(range(len(values)))
    assert spread(groups, values) <= max(values)


@pytest.mark.parametrize("num_groups", [2, 7, 64])
def test_many_values_are_spread_within_a_thousandth_of_the_mean(num_groups):
    values = log_normal_values(seed=3, count=100 * num_groups)
    assert spread(largest_differencing(values, num_groups), values) < sum(values) / num_groups / 1000


@given(st.integers(0, 200), st.integers(1, 9))
def test_groups_get_equally_many_of_equal_values(count, num_groups):
    sizes = [len(group) for group in largest_differencing([5] * count, num_groups)]
    assert max(sizes) - min(sizes) <= 1


def test_a_long_row_costs_more_than_its_tokens_in_short_rows():
    long, short = RowCost(per_token=12 * 1024, per_token_squared=1).of(np.array([8192, 4096]))
    assert long > 2 * short
