from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdrl.dataflow.samples.balancing.balance import (
    SLACK_PERCENT,
    RowLoads,
    Taker,
    assign_parts,
    assign_rows,
    deal_groups,
    most_groups_each,
)
from spmdrl.dataflow.samples.balancing.dealing import GroupLengths
from spmdrl.engines.training.microbatch import fewest_microbatches
from spmdrl.nouns.partition import RowCost

GROUP_SIZE = 3
COST = RowCost(per_token=12 * 1024, per_token_squared=1)
ALLOWED = 1 + SLACK_PERCENT / 100


def loads_of(homes, costs, rows=None) -> RowLoads:
    rows = range(len(homes)) if rows is None else rows
    return RowLoads(*(np.array(list(values), dtype=np.int64) for values in (rows, homes, costs)))


@dataclass(frozen=True)
class DrawnRows(RowLoads):
    lengths: np.ndarray


def responses(num_rows, num_nodes, *, seed, skew=0.0, longest=4096) -> DrawnRows:
    """Log-normal lengths in groups of 8; with `skew`, later nodes have longer ones."""
    homes = (np.arange(num_rows // 8) * num_nodes // (num_rows // 8)).repeat(8)
    factors = 1 + skew * np.linspace(-1, 1, num_nodes)
    lengths = np.random.default_rng(seed).lognormal(6.0, 0.8, num_rows) * factors[homes]
    lengths = lengths.clip(1, longest).astype(np.int64)
    return DrawnRows(np.arange(num_rows), homes, COST.of(lengths), lengths)


def nodes_of(num_takers, num_nodes):
    return [Taker(rank, rank * num_nodes // num_takers) for rank in range(num_takers)]


def carried(shares, values) -> np.ndarray:
    return np.array([values[share].sum() for share in shares])


def is_foreign(shares, loads, takers) -> np.ndarray:
    """Whether each row is worked on by another node than its home."""
    foreign = np.zeros(loads.rows.size, dtype=bool)
    for taker, share in zip(takers, shares, strict=True):
        foreign[share] = loads.homes[share] != taker.node
    return foreign


def surplus_by_node(loads, takers) -> np.ndarray:
    """What leaves each node whose takers may carry no more than their slack: the load above that."""
    nodes = range(1 + max(taker.node for taker in takers))
    load = np.array([loads.costs[loads.homes == node].sum() for node in nodes])
    sizes = np.array([sum(taker.node == node for taker in takers) for node in nodes])
    return np.maximum(load - sizes * loads.costs.sum() * ALLOWED / len(takers), 0)


@st.composite
def problems(draw):
    num_nodes = draw(st.integers(1, 3))
    takers = [Taker(rank, rank // 2) for rank in range(2 * num_nodes)]
    num_groups = draw(st.integers(0, 8))
    # The last home may have no taker.
    group_homes = draw(st.lists(st.integers(0, num_nodes), min_size=num_groups, max_size=num_groups))
    homes = [home for home in group_homes for _ in range(GROUP_SIZE)]
    costs = draw(st.lists(st.integers(1, 1000), min_size=len(homes), max_size=len(homes)))
    return loads_of(homes, costs), takers


@st.composite
def fine_problems(draw):
    """Many rows, none above 5% of the mean load, unevenly over nodes of several sizes."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    takers = [Taker(rank, node) for rank, node in enumerate(np.repeat(np.arange(len(sizes)), sizes).tolist())]
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shares_of_nodes = random.dirichlet(np.ones(len(sizes)))
    num_rows = draw(st.integers(40, 80)) * len(takers)
    lengths = random.integers(100, 150, num_rows)
    homes = random.choice(len(sizes), num_rows, p=shares_of_nodes)
    return RowLoads(np.arange(num_rows), homes, COST.of(lengths)), takers


@given(problems(), st.booleans(), st.integers(0, 2**64))
def test_every_row_is_assigned_exactly_once(problem, locality, seed):
    loads, takers = problem
    shares = assign_rows(loads, takers, seed=seed, step=3, locality=locality)
    assert len(shares) == len(takers)
    assert sorted(row for share in shares for row in share) == loads.rows.tolist()
    assert all((np.diff(share) > 0).all() for share in shares)


@given(fine_problems(), st.integers(0, 2**32))
def test_parts_of_groups_keep_the_limit_with_what_they_share_counted_once(problem, seed):
    loads, takers = problem
    shared = loads.costs // 3
    dealt = assign_parts(loads, shared, takers, seed=seed, step=1, locality=True, group_size=8)
    assert sorted(row for share in dealt for row in share) == loads.rows.tolist()
    assert all((np.diff(share) > 0).all() for share in dealt)
    carried_once = []
    for share in dealt:
        by_group = {row // 8: shared[row] for row in share.tolist()}
        carried_once.append(sum((loads.costs - shared)[share]) + sum(by_group.values()))
    single = carried(assign_rows(loads, takers, seed=seed, step=1), loads.costs)
    assert max(carried_once) <= max(single)


@pytest.mark.parametrize("num_groups, part_size", [(16, 8), (6, 4), (5, 2)])
def test_groups_are_cut_no_finer_than_balance_needs(num_groups, part_size):
    """Over 4 takers: of equal rows, so many groups can be dealt evenly in parts of this size, and in no larger ones."""
    loads = loads_of([0] * 8 * num_groups, [10] * 8 * num_groups)
    takers = nodes_of(4, 1)
    dealt = assign_parts(loads, loads.costs // 2, takers, seed=0, step=0, locality=True, group_size=8)
    sizes = [count for share in dealt for count in Counter((share // part_size).tolist()).values()]
    assert set(sizes) == {part_size}


@given(problems(), st.randoms())
def test_the_order_in_which_rows_and_takers_are_named_makes_no_difference(problem, random):
    loads, takers = problem
    order, numbers = list(range(loads.rows.size)), list(range(len(takers)))
    random.shuffle(order)
    random.shuffle(numbers)
    shuffled = RowLoads(loads.rows[order], loads.homes[order], loads.costs[order])
    shares = assign_rows(loads, takers, seed=5, step=1)
    again = assign_rows(shuffled, [takers[number] for number in numbers], seed=5, step=1)
    assert [share.tolist() for share in again] == [shares[number].tolist() for number in numbers]


@given(problems(), st.booleans())
def test_no_taker_carries_more_than_the_mean_its_slack_and_one_row(problem, locality):
    loads, takers = problem
    shares = assign_rows(loads, takers, seed=0, step=0, locality=locality)
    heaviest = carried(shares, loads.costs).max()
    assert heaviest <= loads.costs.sum() / len(takers) * ALLOWED + max(loads.costs, default=0)


@given(fine_problems(), st.booleans())
def test_the_heaviest_taker_is_within_its_slack_when_no_row_is_larger_than_that(problem, locality):
    loads, takers = problem
    shares = assign_rows(loads, takers, seed=0, step=0, locality=locality)
    assert carried(shares, loads.costs).max() <= loads.costs.sum() * ALLOWED / len(takers)


@given(fine_problems())
def test_a_node_gives_away_its_surplus_and_a_row_or_so_for_each_taker(problem):
    loads, takers = problem
    shares = assign_rows(loads, takers, seed=0, step=0)
    foreign = is_foreign(shares, loads, takers)
    for node, surplus in enumerate(surplus_by_node(loads, takers)):
        gone = loads.costs[foreign & (loads.homes == node)].sum()
        num_takers = sum(taker.node == node for taker in takers)
        assert surplus <= gone <= surplus + (1 + num_takers) * loads.costs.max() * (gone > 0)


@pytest.mark.parametrize("num_takers", [32, 128])
def test_little_more_than_the_surplus_of_uneven_nodes_is_moved(num_takers):
    loads, takers = responses(8192, 16, seed=1, skew=0.5), nodes_of(num_takers, 16)
    shares = assign_rows(loads, takers, seed=0, step=0)
    assert carried(shares, loads.costs).max() <= loads.costs.sum() * ALLOWED / num_takers
    foreign = is_foreign(shares, loads, takers)
    surplus = surplus_by_node(loads, takers)
    assert loads.costs[foreign].sum() <= surplus.sum() + 16 * 0.6 * loads.costs.mean()
    # Those that move are the long ones, so they are fewer tokens than their share of the cost.
    assert loads.lengths[foreign].sum() / loads.lengths.sum() < 0.9 * surplus.sum() / loads.costs.sum()


@pytest.mark.parametrize("num_nodes", [2, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_no_more_rows_cross_nodes_than_must(num_nodes, seed):
    loads, takers = responses(4096, num_nodes, seed=seed, skew=0.2), nodes_of(2 * num_nodes, num_nodes)
    foreign = is_foreign(assign_rows(loads, takers, seed=0, step=0), loads, takers)
    for node, surplus in enumerate(surplus_by_node(loads, takers)):
        at_home = loads.homes == node
        # The longest ones that are worth the surplus; one more where no whole rows fill takers to the brim.
        worth = np.sort(loads.costs[at_home])[::-1].cumsum()
        least = int((worth < surplus).sum()) + 1 if surplus else 0
        assert least <= (foreign & at_home).sum() <= least + (surplus > 0)
    assert foreign.any()


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5))
def test_rows_stay_at_home_when_nodes_carry_the_same(num_nodes, ranks_per_node, rows_per_rank):
    takers = [Taker(rank, rank // ranks_per_node) for rank in range(num_nodes * ranks_per_node)]
    loads = loads_of([row % num_nodes for row in range(len(takers) * rows_per_rank)], [7] * len(takers) * rows_per_rank)
    shares = assign_rows(loads, takers, seed=0, step=0)
    assert not is_foreign(shares, loads, takers).any()
    assert {len(share) for share in shares} == {rows_per_rank}


def test_rows_cross_nodes_only_as_far_as_balance_needs():
    shares = assign_rows(loads_of([0] * 8 + [1] * 2, [10] * 10), [Taker(0, 0), Taker(1, 1)], seed=0, step=0)
    assert [len(share) for share in shares] == [5, 5]
    assert {8, 9} <= set(shares[1].tolist())


def test_rows_stay_at_home_while_one_row_outweighs_whatever_they_could_even_out():
    shares = assign_rows(loads_of([0, 1, 1, 1], [100, 10, 20, 30]), [Taker(0, 0), Taker(1, 1)], seed=0, step=0)
    assert [share.tolist() for share in shares] == [[0], [1, 2, 3]]


def test_an_exchange_evens_out_what_differencing_leaves_uneven():
    # Differencing ends at 3 + 2 + 2 and 3 + 2; all that is even is 3 + 3 and 2 + 2 + 2.
    shares = assign_rows(loads_of([0] * 5, [3, 3, 2, 2, 2]), [Taker(0, 0), Taker(1, 0)], seed=0, step=0)
    assert sorted(share.tolist() for share in shares) == [[0, 1], [2, 3, 4]]


def test_without_locality_homes_make_no_difference():
    loads, takers = responses(512, 4, seed=2, skew=0.5), nodes_of(8, 4)
    elsewhere = RowLoads(loads.rows, loads.homes[::-1], loads.costs)
    shares, again = (assign_rows(rows, takers, seed=0, step=0, locality=False) for rows in (loads, elsewhere))
    assert [share.tolist() for share in shares] == [share.tolist() for share in again]
    assert carried(shares, loads.costs).max() < loads.costs.sum() * 1.01 / 8


def test_rows_without_a_taker_at_home_go_to_the_lightest_node():
    shares = assign_rows(loads_of([0, 3, 3], [5, 1, 1]), [Taker(0, 0), Taker(1, 1)], seed=0, step=0)
    assert [share.tolist() for share in shares] == [[0], [1, 2]]


def test_each_rank_is_sometimes_the_one_with_the_longest_row():
    loads, takers = loads_of([0] * 8, [100, *[10] * 7]), nodes_of(4, 1)
    owners = Counter()
    for step in range(200):
        shares = assign_rows(loads, takers, seed=11, step=step)
        owners[next(rank for rank, share in enumerate(shares) if 0 in share)] += 1
    assert min(owners[rank] for rank in range(4)) > 25


def test_a_deal_is_the_same_on_every_platform():
    loads, takers = (
        loads_of([0, 0, 0, 0, 0, 0, 1, 1], [9, 9, 9, 4, 4, 1, 5, 5]),
        [Taker(rank, rank // 2) for rank in range(4)],
    )
    shares = assign_rows(loads, takers, seed=2**63 + 1, step=7)
    assert [share.tolist() for share in shares] == [[1, 5], [2, 3], [6, 7], [0, 4]]


@pytest.mark.parametrize("num_takers", [2, 8])
@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("max_tokens", [4096, 16384])
def test_takers_need_equal_numbers_of_micro_batches_or_one_more(num_takers, num_nodes, max_tokens):
    takers, num_equal = nodes_of(num_takers, num_nodes), 0
    for seed in range(10):
        loads = responses(64 * num_takers, num_nodes, seed=seed)
        shares = assign_rows(loads, takers, seed=seed, step=0)
        counts = [
            len(fewest_microbatches(lengths.tolist(), COST.of(lengths).tolist(), max_tokens=max_tokens))
            for lengths in (loads.lengths[share] for share in shares)
        ]
        assert max(counts) - min(counts) <= 1
        num_equal += max(counts) == min(counts)
    # Across nodes takers may differ by their slack, which is half a micro-batch where a taker has ten.
    assert num_equal >= (7 if num_nodes == 1 else 3)


@pytest.mark.slow
def test_half_a_million_rows_are_dealt_evenly_over_a_thousand_takers():
    loads, takers = responses(524_288, 128, seed=0, skew=0.3), nodes_of(1024, 128)
    shares = assign_rows(loads, takers, seed=0, step=0)
    assert carried(shares, loads.costs).max() <= loads.costs.sum() * ALLOWED / 1024


def test_no_taker_at_all_is_refused():
    with pytest.raises(ValueError, match="1 rows have no taker"):
        assign_rows(loads_of([0], [1]), [], seed=0, step=0)
    with pytest.raises(ValueError, match="1 groups have no taker"):
        deal_groups([5], [-1], [], seed=0, step=0)


def dealt(lengths: GroupLengths, takers: list[Taker], *, step: int = 0, size: int = GROUP_SIZE) -> list[np.ndarray]:
    """The groups of each taker, all of them new."""
    places = [-1] * len(lengths.prompts)
    taker_of_group = deal_groups(lengths.costs(COST, size), places, takers, seed=1, step=step)
    return [np.flatnonzero(taker_of_group == place) for place in range(len(takers))]


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 4), st.integers(0, 100))
def test_while_no_length_is_known_takers_generate_equally_many_groups_with_equal_prompts(prompts, num_nodes, step):
    takers = nodes_of(2 * num_nodes, num_nodes)
    shares = dealt(GroupLengths(prompts, None), takers, step=step)
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(prompts)))
    sizes, tokens = (
        ([int(function(share)) for share in shares] for function in (np.size, np.array(prompts)[...].take))
        if False
        else ([share.size for share in shares], [sum(prompts[group] for group in share) for share in shares])
    )
    assert max(sizes) - min(sizes) <= 1
    for size in set(sizes):
        of_size = [total for total, each in zip(tokens, sizes, strict=True) if each == size]
        assert max(of_size) - min(of_size) <= 50
    # Groups that are left over go to different nodes.
    by_node = [sum(sizes[node * 2 : node * 2 + 2]) for node in range(num_nodes)]
    assert max(by_node) - min(by_node) <= 2


def test_the_group_that_is_left_over_goes_to_every_rank_in_some_step():
    prompts = GroupLengths([5] * 9, None)
    largest = {
        max(range(8), key=lambda place: shares[place].size)
        for shares in (dealt(prompts, nodes_of(8, 4), step=step) for step in range(80))
    }
    assert largest == set(range(8))


GROUPS_OF_LENGTHS = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 2000)), min_size=1, max_size=60)


@given(GROUPS_OF_LENGTHS, st.integers(1, 9), st.integers(0, 100))
def test_takers_generate_what_is_expected_to_cost_alike_as_far_as_their_caches_allow(groups, num_takers, step):
    prompts, responses = map(list, zip(*groups, strict=True))
    shares = dealt(GroupLengths(prompts, responses), nodes_of(num_takers, 1), step=step)
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(groups)))
    most = most_groups_each(len(groups), num_takers)
    assert max(share.size for share in shares) <= most <= max(1, math.ceil(1.25 * len(groups) / num_takers))
    costs = [COST.of_group(*group, GROUP_SIZE) for group in groups]
    loads = [sum(costs[group] for group in share) for share in shares]
    # One with room left has at least what any other had before its last, cheapest group.
    for place, share in enumerate(shares):
        others = [
            loads[other] - min(costs[group] for group in shares[other])
            for other in range(num_takers)
            if shares[other].size
        ]
        assert share.size == most or loads[place] >= max(others, default=0)


@pytest.mark.parametrize(("num_groups", "num_takers"), [(512, 16), (512, 64), (64, 8)])
def test_expected_lengths_even_out_what_equal_numbers_do_not(num_groups, num_takers):
    random = np.random.default_rng(num_groups)
    responses = random.lognormal(6.0, 0.8, num_groups).clip(1, 4096).astype(int).tolist()
    prompts = random.integers(20, 200, num_groups).tolist()
    costs = np.array([COST.of_group(*pair, 16) for pair in zip(prompts, responses, strict=True)])
    heaviest = []
    for expected in (responses, None):
        loads = carried(dealt(GroupLengths(prompts, expected), nodes_of(num_takers, 1), size=16), costs)
        heaviest.append(loads.max() / loads.mean())
    assert heaviest[0] < 1.02 or heaviest[0] < costs.max() / costs.sum() * num_takers * 1.02
    assert heaviest[1] > 1.1


def test_a_group_that_was_begun_stays_where_it_is_and_counts_there():
    taker_of_group = deal_groups([9, 1, 1, 1], [0, -1, -1, -1], nodes_of(2, 1), seed=0, step=0)
    assert taker_of_group.tolist() == [0, 1, 1, 1]


@given(problems(), st.booleans(), st.integers(0, 99), st.data())
def test_what_is_left_of_a_group_goes_to_one_taker(problem, locality, seed, data):
    loads, takers = problem
    places = [place for place in range(loads.rows.size) if data.draw(st.booleans())]
    left = RowLoads(*(values[places] for values in (loads.rows, loads.homes, loads.costs)))
    shares = assign_rows(left, takers, seed=seed, step=1, locality=locality, group_size=GROUP_SIZE)
    assert sorted(row for share in shares for row in share) == left.rows.tolist()
    assert all((np.diff(share) > 0).all() for share in shares)
    owners = [{row // GROUP_SIZE for row in share.tolist()} for share in shares]
    assert sum(map(len, owners)) == len(set().union(*owners)), "a group is with one taker"
    heaviest = max((sum(loads.costs[share]) for share in shares), default=0)
    of_groups = np.bincount(left.rows // GROUP_SIZE, weights=left.costs) if places else np.zeros(1)
    assert heaviest <= left.costs.sum() / len(takers) * ALLOWED + of_groups.max()
