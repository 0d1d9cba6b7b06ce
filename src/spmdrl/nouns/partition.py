"""Balanced partitions: costs of rows, and numbers spread over groups of nearly equal sums. Integers only."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from spmdrl.nouns.batch import Integers

Lengths = TypeVar("Lengths", int, Integers)

_ALONE_PER_GROUP, _ALONE_OF_MANY, _MANY_PER_GROUP = 64, 16, 256
"""Number of largest values per group that are placed one by one (fewer where a group gets many). Smaller values are
dealt in turn into parts, which are placed whole: half the time for half a million rows over 1,024 ranks."""


@dataclass(frozen=True)
class RowCost:
    """The work of a row of L tokens: `per_row + per_token * L + per_token_squared * L**2`."""

    per_token: int
    per_token_squared: int
    per_row: int = 0

    def of(self, length: Lengths) -> Lengths:
        return self.per_row + self.per_token * length + self.per_token_squared * length * length

    def of_group(self, num_prompt: int, num_response: int, group_size: int) -> int:
        """Return the work of a group of equally long responses whose prompt is computed once."""
        prompt = self.of(num_prompt)
        return prompt + group_size * (self.of(num_prompt + num_response) - prompt)


TOKENS = RowCost(per_token=1, per_token_squared=0)
ROWS = RowCost(per_token=0, per_token_squared=0, per_row=1)
"""The same cost for every row."""

# A shorter prompt saves less than copies in attention and plans on the host may cost: with responses four times as long
# updates took 0.85 to 0.92 of the time and log-prob passes 0.94 to 1.07, with equally long responses at most 0.75.
_LONGEST_RESPONSE_PER_PROMPT = 4


def shares_prompt(num_prompt: Any, num_response: Any) -> Any:
    """Return True if rows of these lengths compute their group's prompt once; takes numbers or arrays."""
    return num_response <= _LONGEST_RESPONSE_PER_PROMPT * num_prompt


_Group = tuple[int, Any]
"""A sum of values, and their indexes as a tree: a list, or a pair of trees."""


def largest_differencing(values: Sequence[int], num_groups: int) -> list[list[int]]:
    """Spread the indexes of `values` over groups of nearly equal sums, the heaviest first; equal values are spread
    evenly.

    The largest differencing method (Karmarkar and Karp, The differencing method of set partitioning, UC Berkeley,
    UCB/CSD-83-113, 1982) for any number of groups: the two partial solutions of the largest spread are joined, the
    heaviest group of one with the lightest of the other, until one solution is left. The sums differ by no more than
    the largest value. Deterministic; takes about as long as sorting.
    """
    order = sorted(range(len(values)), key=values.__getitem__, reverse=True)
    if num_groups == 1:
        return [order]
    solutions = _first_solutions(values, order, num_groups)
    # The number breaks ties between equal spreads.
    heap = [(-_spread(groups, num_groups), number, groups) for number, groups in enumerate(solutions)]
    heapq.heapify(heap)
    for number in range(len(heap), 2 * len(heap) - 1):
        groups = heapq.heappop(heap)[2]
        joined = _joined(groups, heap[0][2], num_groups)
        heapq.heapreplace(heap, (-_spread(joined, num_groups), number, joined))
    found = [_leaves(members) for _, members in heap[0][2]] if heap else []
    return found + [[] for _ in range(num_groups - len(found))]


def _first_solutions(values: Sequence[int], order: list[int], num_groups: int) -> Iterator[list[_Group]]:
    """Yield the solutions that joins begin with; each lists its groups that have members, heaviest first."""
    alone = _ALONE_PER_GROUP if len(order) < _MANY_PER_GROUP * num_groups else _ALONE_OF_MANY
    num_alone = alone * num_groups
    for index in order[:num_alone]:
        yield [(values[index], [index])]
    there_and_back = 2 * num_groups
    part_size = num_groups * max(1, len(order) // num_alone)
    for start in range(num_alone, len(order), part_size):
        part = order[start : start + part_size]
        dealt = [part[k::there_and_back] + part[there_and_back - 1 - k :: there_and_back] for k in range(num_groups)]
        yield sorted([(sum(values[index] for index in own), own) for own in dealt if own], key=_descending)


def _spread(groups: list[_Group], num_groups: int) -> int:
    return groups[0][0] - (groups[-1][0] if len(groups) == num_groups else 0)


def _joined(groups: list[_Group], others: list[_Group], num_groups: int) -> list[_Group]:
    """Join place k of one with place `num_groups - 1 - k` of the other; places past the end are empty."""
    if len(others) == 1:
        # Most joins are of this kind and need no sorting.
        single = others[0]
        if len(groups) == num_groups:
            total, members = groups.pop()
            single = (total + single[0], (members, single[1]))
        bisect.insort(groups, single, key=_descending)
        return groups
    start = max(num_groups - len(others), 0)
    met = zip(groups[start:], reversed(others[num_groups - len(groups) :]), strict=True)
    joined = [(heavy + light, (members, more)) for (heavy, members), (light, more) in met]
    joined += groups[:start] + others[: num_groups - len(groups)]
    return sorted(joined, key=_descending)


def _descending(group: _Group) -> int:
    return -group[0]


def _leaves(tree: Any) -> list[int]:
    out, todo = [], [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, tuple):
            todo += node
        else:
            out += node
    return out
