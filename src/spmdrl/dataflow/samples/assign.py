"""Who takes which rows: a pure function of metadata, which every rank evaluates alike.

Costs are integers, so that no rounding can make two ranks disagree.
"""

from __future__ import annotations

import bisect
import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Taker:
    """A rank that takes rows, and its node."""

    rank: int
    node: int


@dataclass(frozen=True)
class TokenCost:
    """Work of a row of L tokens: linear * L + quadratic * L^2, in arbitrary integer units.

    A decoder layer of width D costs about 24 D^2 operations a token in its matrix products and 2 L D in causal
    attention, so linear : quadratic = 12 D : 1; the default is D = 1024.
    """

    linear: int = 12 * 1024
    quadratic: int = 1

    def of(self, lengths_B: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.linear * lengths_B + self.quadratic * lengths_B * lengths_B


@dataclass(frozen=True, order=True)
class _Unit:
    """Rows that stay together."""

    cost: int
    negative_first_row: int
    """Negative, so that of two equal costs the later row sorts first and the earlier row is popped first."""
    rows: tuple[int, ...] = field(compare=False)
    home: int = field(compare=False)


def assign_rows(
    rows: Sequence[int],
    homes: Sequence[int],
    costs: Sequence[int],
    takers: Sequence[Taker],
    group_size: int | None = None,
    *,
    slack_percent: int = 5,
) -> list[list[int]]:
    """Deal rows over takers, each row once; returns one ascending list a taker, in the order of `takers`.

    Rows stay on their home node, the most expensive first to the least loaded taker there. They cross nodes only
    while the heaviest taker carries more than `slack_percent` above the mean and the move makes things more even,
    or where the home has no taker. With `group_size`, the rows of a group (row // group_size) stay together.
    """
    if not takers:
        raise ValueError(f"{len(rows)} rows have no taker; name at least one rank that takes them")
    units = _units(rows, homes, costs, group_size)
    dealt = _deal_at_home(units, takers)
    _even_out(dealt, slack_percent)
    return [sorted(row for unit in mine for row in unit.rows) for mine in dealt]


def _units(rows: Sequence[int], homes: Sequence[int], costs: Sequence[int], group_size: int | None) -> list[_Unit]:
    """Rows or whole groups, cheapest first."""
    members: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for row, home, cost in zip(rows, homes, costs, strict=True):
        members[row // (group_size or 1)].append((int(row), int(home), int(cost)))
    units = []
    for group in members.values():
        group.sort()
        assert len({home for _, home, _ in group}) == 1, f"rows of one group live in several warehouses: {group}"
        kept = tuple(row for row, _, _ in group)
        units.append(_Unit(sum(cost for _, _, cost in group), -kept[0], kept, group[0][1]))
    return sorted(units)


def _deal_at_home(units: list[_Unit], takers: Sequence[Taker]) -> list[list[_Unit]]:
    """Longest processing time first, node by node; every taker's units come out cheapest first."""
    by_node: dict[int, list[int]] = defaultdict(list)
    for number, taker in enumerate(takers):
        by_node[taker.node].append(number)
    dealt: list[list[_Unit]] = [[] for _ in takers]
    heaps = {node: [(0, number) for number in numbers] for node, numbers in by_node.items()}
    homeless = [unit for unit in units if unit.home not in by_node]
    for unit in reversed(units):
        if unit.home in by_node:
            _give_to_lightest(unit, heaps[unit.home], dealt)
    everyone = [(sum(unit.cost for unit in dealt[number]), number) for number in range(len(takers))]
    heapq.heapify(everyone)
    for unit in reversed(homeless):
        _give_to_lightest(unit, everyone, dealt)
    return [sorted(mine) for mine in dealt]


def _give_to_lightest(unit: _Unit, heap: list[tuple[int, int]], dealt: list[list[_Unit]]) -> None:
    load, number = heap[0]
    dealt[number].append(unit)
    heapq.heapreplace(heap, (load + unit.cost, number))


def _even_out(dealt: list[list[_Unit]], slack_percent: int) -> None:
    """Move units from the heaviest taker to the lightest one, as balance needs.

    Each move lowers the sum of squared loads, so this ends.
    """
    loads = [sum(unit.cost for unit in mine) for mine in dealt]
    total, count = sum(loads), len(loads)
    while True:
        heaviest = max(range(count), key=lambda number: (loads[number], -number))
        if loads[heaviest] * count * 100 <= total * (100 + slack_percent):
            return
        lightest = min(range(count), key=lambda number: (loads[number], number))
        position = _best_to_move(dealt[heaviest], loads[heaviest] - loads[lightest])
        if position is None:
            return
        unit = dealt[heaviest].pop(position)
        bisect.insort(dealt[lightest], unit)
        loads[heaviest] -= unit.cost
        loads[lightest] += unit.cost


def _best_to_move(units: list[_Unit], gap: int) -> int | None:
    """The position of the unit whose move evens out a gap best (its cost is nearest to half); None: no move helps."""
    above = bisect.bisect_left(units, gap, key=lambda unit: 2 * unit.cost)
    candidates = [position for position in (above - 1, above) if 0 <= position < len(units)]
    helpful = [position for position in candidates if 0 < units[position].cost < gap]
    return min(helpful, key=lambda position: abs(2 * units[position].cost - gap), default=None)
