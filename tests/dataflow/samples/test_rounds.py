"""Groups that may take several steps: whatever is finished when, each step trains as many, each group in time."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdrl.dataflow.samples.balancing.balance import Taker, deal_groups
from spmdrl.dataflow.samples.balancing.dealing import GroupLengths
from spmdrl.dataflow.samples.pending import (
    PendingGroup,
    Quota,
    RoundRules,
    StepGroups,
    groups_of_step,
    quotas,
    refill_size,
)
from spmdrl.nouns.partition import TOKENS

RULES = st.integers(1, 9).flatmap(
    lambda wanted: st.builds(
        RoundRules, st.just(wanted), st.integers(0, wanted), st.integers(2, 4), num_steps=st.integers(1, 7)
    )
)


def deal(groups: StepGroups, num_takers: int, step: int, expected: list[int] | None = None) -> list[list[int]]:
    places = [*groups.holders, *[-1] * len(groups.new_serials)]
    lengths = GroupLengths([1 + serial * 7 % 5 for serial in groups.serials], expected)
    takers = [Taker(rank, 0) for rank in range(num_takers)]
    taker_of_group = deal_groups(lengths.costs(TOKENS, 4), places, takers, seed=1, step=step)
    return [np.flatnonzero(taker_of_group == taker).tolist() for taker in range(num_takers)]


def answer(rounds: list[int], number: int, rules: RoundRules, random: Random) -> tuple[list[int], list[int]]:
    """One taker's groups become whole in any order, until it has its quota: those trained, and those left."""
    quota = Quota(number, sum(round_ >= rules.max_rounds for round_ in rounds))
    trained, left, order = [], [], random.sample(range(len(rounds)), len(rounds))
    for place in order:
        if not quota.is_met and quota.admit(is_last_round=rounds[place] >= rules.max_rounds):
            trained.append(place)
        else:
            left.append(place)
    assert quota.is_met
    return trained, left


@given(rules=RULES, num_takers=st.integers(1, 5), seed=st.integers(0, 1000))
def test_each_step_trains_as_many_groups_and_each_group_is_trained_once_within_its_rounds(rules, num_takers, seed):
    random, pending, trained = Random(seed), [], []
    for step in range(1, rules.num_steps + 1):
        groups = groups_of_step(pending, step, rules)
        serials, rounds = groups.serials, groups.rounds
        assert serials == sorted(serials) and len(serials) <= rules.num_wanted + rules.num_extra
        shares = deal(groups, num_takers, step, [random.randrange(1, 99) for _ in serials] if step > 1 else None)
        numbers = quotas([[rounds[group] for group in own] for own in shares], rules)
        assert sum(numbers) == rules.num_wanted
        left = []
        for taker, (own, number) in enumerate(zip(shares, numbers, strict=True)):
            assert {groups.holders[group] for group in own if group < len(pending)} <= {taker}
            now, later = answer([rounds[group] for group in own], number, rules, random)
            trained += [serials[own[place]] for place in now]
            left += [PendingGroup(serials[own[place]], rounds[own[place]], taker) for place in later]
        assert all(group.rounds < rules.max_rounds for group in left)
        pending = sorted(left, key=lambda group: group.serial)
    assert not pending and sorted(trained) == list(range(rules.num_steps * rules.num_wanted))


@given(num_groups=st.integers(2, 40), num_takers=st.integers(1, 6), step=st.integers(1, 50))
def test_new_groups_make_the_numbers_of_all_takers_equal(num_groups, num_takers, step):
    pending = [PendingGroup(serial, 1, serial % num_takers) for serial in range(num_groups // 3)]
    shares = deal(StepGroups(tuple(pending), range(len(pending), num_groups)), num_takers, step)
    assert sorted(group for own in shares for group in own) == list(range(num_groups))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_groups_in_their_last_round_keep_their_places():
    quota = Quota(2, 1)
    assert quota.admit(is_last_round=False), "one place is free"
    assert not quota.admit(is_last_round=False), "the other is kept"
    assert not quota.is_met
    assert quota.admit(is_last_round=True) and quota.is_met


def test_what_is_left_over_is_shared_equally():
    rules = RoundRules(num_wanted=4, num_extra=4, max_rounds=3)
    assert quotas([[1, 1, 1, 1], [2, 1, 1, 1]], rules) == [2, 2]
    assert quotas([[3, 3, 3, 1], [1, 1, 1, 1]], rules) == [3, 1]


def test_nothing_is_begun_that_the_run_could_not_train():
    rules = RoundRules(num_wanted=4, num_extra=2, max_rounds=3, num_steps=3)
    assert groups_of_step([], 1, rules).serials == [0, 1, 2, 3, 4, 5]
    pending = [PendingGroup(2, 1, 0), PendingGroup(5, 1, 0)]
    assert groups_of_step(pending, 2, rules).serials == [2, 5, 6, 7, 8, 9]
    assert groups_of_step(pending, 3, rules).serials == [2, 5, 10, 11]
    assert groups_of_step(pending, 3, RoundRules(4, 2, 3, num_steps=9)).serials == [2, 5, 10, 11, 12, 13]


def test_fewer_rounds_than_groups_have_behind_them_finish_all_at_once():
    rules = RoundRules(num_wanted=2)
    groups = groups_of_step([PendingGroup(1, 2, 0)], 2, rules)
    assert (groups.serials, groups.rounds) == ([1, 3], [3, 1])
    assert quotas([groups.rounds], rules) == [2]


def test_a_quota_that_could_not_hold_all_last_rounds_is_refused():
    with pytest.raises(AssertionError):
        quotas([[2, 2, 2]], RoundRules(num_wanted=2, num_extra=2, max_rounds=2))


def shortest_trained(lengths: list[int], num_takers: int, rules: RoundRules) -> list[int]:
    """The groups that a first step trains where a taker's groups become whole in the order of their lengths."""
    groups = groups_of_step([], 1, rules)
    shares = deal(groups, num_takers, step=1)
    numbers = quotas([[1] * len(own) for own in shares], rules)
    first = [sorted(own, key=lengths.__getitem__)[:number] for own, number in zip(shares, numbers, strict=True)]
    return sorted(group for own in first for group in own)


@given(st.lists(st.integers(1, 1000), min_size=12, max_size=12, unique=True), st.integers(1, 6))
def test_the_same_replicas_train_the_same_groups_and_other_replicas_as_many(lengths, num_takers):
    rules = RoundRules(num_wanted=8, num_extra=4, max_rounds=2)
    trained = shortest_trained(lengths, num_takers, rules)
    assert trained == shortest_trained(lengths, num_takers, rules)
    assert len(set(trained)) == len(shortest_trained(lengths, 1, rules)) == 8


def test_other_replicas_may_train_other_groups():
    rules = RoundRules(num_wanted=8, num_extra=4, max_rounds=2)
    on_two = deal(groups_of_step([], 1, rules), 2, step=1)
    # One of two replicas has all the short groups, and its quota is half of them.
    lengths = [group + 100 * (group in on_two[1]) for group in range(12)]
    assert shortest_trained(lengths, 1, rules) != shortest_trained(lengths, 2, rules)
    assert set(on_two[0]) <= set(shortest_trained(lengths, 1, rules))


@given(st.integers(1, 64), st.integers(1, 8), st.data())
def test_a_refill_begins_more_groups_than_are_missing_but_never_more_than_a_step_trains(num_wanted, attempts, data):
    num_begun, num_left = refill_size(num_wanted, 0, 0), 0
    assert num_begun == num_wanted
    for _ in range(attempts):
        num_left = data.draw(st.integers(num_left, min(num_begun, num_wanted - 1)))
        size = refill_size(num_wanted, num_begun, num_left)
        missing = num_wanted - num_left
        assert missing <= size <= num_wanted
        # Half as many again as at the same share, rounded up.
        assert size == num_wanted or 1.5 * missing * num_begun <= size * num_left < 1.5 * missing * num_begun + num_left
        num_begun += size


def test_a_refilled_step_opens_all_that_it_may_begin_after_what_earlier_ones_used_up():
    rules = RoundRules(num_wanted=4, num_steps=2, num_refills=2)
    assert groups_of_step([], 1, rules).serials == list(range(12))
    assert groups_of_step([], 2, rules, num_passed=3).serials == list(range(7, 19))
    assert groups_of_step([], 2, RoundRules(num_wanted=4), num_passed=3).serials == [7, 8, 9, 10]
