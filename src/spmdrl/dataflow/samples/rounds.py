"""Which groups a step works on when responses may take several steps: pure functions that every rank evaluates alike.

A group is a prompt and its responses. Its serial is the prompt's place in the run's order of prompts, counted from 0;
its round counts the steps that worked on it, this one included.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RoundRules:
    """How many groups a step trains, and how many more it works on."""

    num_wanted: int
    """groups that each step trains"""
    num_extra: int = 0
    """groups that a step works on beyond those, at most; never more than `num_wanted`"""
    max_rounds: int = 1
    """the round in which a group must be finished"""
    num_steps: int | None = None
    """steps of the run: nothing is begun that could not be trained; None: no end is known"""
    num_refills: int = 0
    """how often a step may begin more groups in place of those that the algorithm leaves out"""

    def __post_init__(self) -> None:
        # Carried groups are at most `num_extra`, so those in their last round always have a place.
        assert 0 <= self.num_extra <= (self.num_wanted if self.max_rounds > 1 else 0), self
        assert self.num_refills == 0 or self.max_rounds == 1, self

    @property
    def most_groups(self) -> int:
        """Groups that a step works on at once, at most."""
        return self.num_wanted + self.num_extra


@dataclass(frozen=True)
class CarriedGroup:
    """A group that one step began and a later one goes on with."""

    serial: int
    rounds: int
    """the rounds that are behind it"""
    holder: int
    """the rank that has its responses so far"""


@dataclass(frozen=True)
class StepGroups:
    """The groups of a step, oldest first: what was carried over, then new ones."""

    carried: tuple[CarriedGroup, ...]
    new_serials: range

    @property
    def serials(self) -> list[int]:
        return [*(group.serial for group in self.carried), *self.new_serials]

    @property
    def holders(self) -> list[int]:
        """The ranks that go on with the carried groups."""
        return [group.holder for group in self.carried]

    @property
    def rounds(self) -> list[int]:
        """Which round each group is in."""
        return [*(group.rounds + 1 for group in self.carried), *(1 for _ in self.new_serials)]


def groups_of_step(carried: Sequence[CarriedGroup], step: int, rules: RoundRules, num_passed: int = 0) -> StepGroups:
    """Return the groups of a step, counted from 1, before which `carried` was left over; with refills all it may begin.

    The earlier steps began (step - 1) * num_wanted groups, those carried, and `num_passed` others.
    """
    num_begun = (step - 1) * rules.num_wanted + len(carried) + num_passed
    most = rules.most_groups
    if rules.num_steps is not None:
        most = min(most, (rules.num_steps - step + 1) * rules.num_wanted)
    most *= 1 + rules.num_refills
    return StepGroups(tuple(carried), range(num_begun, num_begun + max(0, most - len(carried))))


def quotas(rounds_by_taker: Sequence[Sequence[int]], rules: RoundRules) -> list[int]:
    """How many of its groups each taker is to finish for training, `num_wanted` in all.

    A group in its last round always counts. The rest goes to the replicas that would leave most groups over,
    so that all leave equally many. It follows from the deal alone, never from timing.
    """
    numbers = [sum(round_ >= rules.max_rounds for round_ in rounds) for rounds in rounds_by_taker]
    num_groups, num_last = sum(map(len, rounds_by_taker)), sum(numbers)
    assert num_last <= rules.num_wanted <= num_groups, (num_last, rules.num_wanted, num_groups)
    left = [(numbers[taker] - len(rounds), taker) for taker, rounds in enumerate(rounds_by_taker)]
    heapq.heapify(left)
    for _ in range(rules.num_wanted - num_last):
        over, taker = left[0]
        heapq.heapreplace(left, (over + 1, taker))
        numbers[taker] += 1
    return numbers


def refill_size(num_wanted: int, num_begun: int, num_left: int) -> int:
    """How many groups a step begins next, which began some of which the algorithm left `num_left`.

    Half as many again as make up the `num_wanted` that it trains if as large a share of them is left: an attempt takes
    as long as its longest response, so that one more costs more than a few prompts too many.
    """
    if num_left == 0:
        return num_wanted
    return min(num_wanted, -(-3 * (num_wanted - num_left) * num_begun // (2 * num_left)))


class Quota:
    """Decides which whole groups of one taker its step trains, in the order in which they become whole."""

    def __init__(self, number: int, num_last: int):
        """`num_last` of its groups are in their last round; places are kept for them."""
        assert num_last <= number, (num_last, number)
        self.number = number
        self._num_open = number
        self._num_last = num_last

    @property
    def is_met(self) -> bool:
        return self._num_open == 0

    def admit(self, *, is_last_round: bool) -> bool:
        """Whether a group that is whole now is trained in this step; else it is carried over whole."""
        if is_last_round:
            self._num_last -= 1
        elif self._num_open == self._num_last:
            return False
        self._num_open -= 1
        return True
