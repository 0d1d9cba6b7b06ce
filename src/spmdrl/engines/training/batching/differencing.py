"""Number partitioning: groups of nearly equal sums."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class _Group:
    total: float
    members: list[int]


def largest_differencing(values: Sequence[float], num_groups: int) -> list[list[int]]:
    """Spread the indexes of `values` over groups of nearly equal sums, by the largest differencing method.

    Karmarkar and Karp, The differencing method of set partitioning (UC Berkeley, UCB/CSD-83-113, 1982), for any
    number of groups: the two partial solutions of the largest spread are joined, the heaviest group of one with the
    lightest of the other, until one solution is left. Deterministic; the time is that of sorting.
    """
    # A solution lists its groups that have members, heaviest first; the number breaks ties between equal spreads.
    solutions = [(-value, index, [_Group(value, [index])]) for index, value in enumerate(values)]
    heapq.heapify(solutions)
    for number in range(len(values), 2 * len(values) - 1):
        _, _, groups = heapq.heappop(solutions)
        _, _, others = heapq.heappop(solutions)
        joined = _joined(groups, others, num_groups)
        lightest = joined[-1].total if len(joined) == num_groups else 0.0
        heapq.heappush(solutions, (lightest - joined[0].total, number, joined))
    found = [group.members for group in solutions[0][2]] if solutions else []
    return found + [[] for _ in range(num_groups - len(found))]


def _joined(groups: list[_Group], others: list[_Group], num_groups: int) -> list[_Group]:
    """Join place k of one with place `num_groups - 1 - k` of the other; places past the end are empty."""
    met = range(num_groups - len(others), len(groups))
    pairs = [(groups[place], others[num_groups - 1 - place]) for place in met]
    joined = [_Group(heavy.total + light.total, heavy.members + light.members) for heavy, light in pairs]
    joined += groups[: num_groups - len(others)] + others[: num_groups - len(groups)]
    return sorted(joined, key=lambda group: -group.total)
