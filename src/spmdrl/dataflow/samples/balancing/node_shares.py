"""Division of units over nodes: each works on its own, up to its takers' limits."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from spmdrl.nouns.batch import Integers


@dataclass(frozen=True)
class Seats:
    """Takers in this step's order of precedence; arrays are [num_seats]."""

    takers: Integers
    """places in the caller's order"""
    nodes: Integers
    """node numbers, from 0"""
    node_numbers: dict[int, int]

    @property
    def num_nodes(self) -> int:
        return len(self.node_numbers)

    def number_nodes(self, homes: Integers) -> Integers:
        """Number the home nodes; -1 for a home without takers."""
        table = np.full(1 + max(int(homes.max()), *self.node_numbers), -1)
        table[list(self.node_numbers)] = list(self.node_numbers.values())
        return table[homes]


@dataclass(frozen=True)
class Units:
    """Indivisible units to deal, costliest first, then by row; arrays are [num_units]."""

    costs: Integers
    homes: Integers
    """numbers of home nodes; -1 without a taker there"""


def nodes_of_units(units: Units, seats: Seats, *, limit: int) -> Integers:
    """Return the node for each unit: its home, except for units without a taker there or beyond the takers' limits.

    `limit` is per taker. Such units go to other nodes, first to the one with the least load per taker.
    """
    nodes = units.homes.copy()
    at_home = nodes >= 0
    loads = np.zeros(seats.num_nodes, dtype=np.int64)
    np.add.at(loads, nodes[at_home], units.costs[at_home])
    sizes = np.bincount(seats.nodes)
    excess = (loads - sizes * limit).tolist()
    receivers = _Receivers(loads.tolist(), sizes.tolist())
    for unit in np.flatnonzero(~at_home).tolist():
        nodes[unit] = receivers.give(int(units.costs[unit]))
    for home in range(seats.num_nodes):
        if excess[home] > 0:
            _shed(units, nodes, receivers, home=home, excess=excess[home], limit=limit)
    return nodes


class _Receivers:
    """Nodes by load per taker, the lightest first."""

    def __init__(self, loads: list[int], sizes: list[int]):
        self._loads, self._sizes = loads, sizes
        # Loads per taker, times a common number, so that they are integers.
        common = math.lcm(*sizes)
        self._weights = [common // size for size in sizes]
        self._heap = [(loads[node] * self._weights[node], node) for node in range(len(loads))]
        heapq.heapify(self._heap)

    def give(self, cost: int) -> int:
        """Add the cost to the lightest node, and return that node."""
        node = self._heap[0][1]
        self._loads[node] += cost
        heapq.heapreplace(self._heap, (self._loads[node] * self._weights[node], node))
        return node

    def can_take(self, cost: int, limit: int) -> bool:
        """Return True if the lightest node's takers may carry this too."""
        node = self._heap[0][1]
        return self._loads[node] + cost <= self._sizes[node] * limit


def _shed(units: Units, nodes: Integers, receivers: _Receivers, *, home: int, excess: int, limit: int) -> None:
    """Move the fewest units worth `excess` from their home to light nodes, as far as these can take them.

    The costliest units go while one alone is worth less than the rest, then the cheapest one that covers it. Long rows
    cost most per token, so few bytes move.
    """
    last = -1
    for unit in np.flatnonzero(units.homes == home).tolist():
        cost = int(units.costs[unit])
        if cost >= excess:
            last = unit
            continue
        if last >= 0 and receivers.can_take(int(units.costs[last]), limit):
            break
        if receivers.can_take(cost, limit):
            nodes[unit] = receivers.give(cost)
            excess -= cost
    if last >= 0 and excess > 0 and receivers.can_take(int(units.costs[last]), limit):
        nodes[last] = receivers.give(int(units.costs[last]))


def split_by(owners: Integers, num_owners: int, *, values: Integers | None = None) -> list[Integers]:
    """Return the values (default: positions) of each owner, in their order."""
    # numpy sorts 16 bits in linear time.
    order = np.argsort(owners.astype(np.uint16) if num_owners <= 2**16 else owners, kind="stable")
    ends = np.bincount(owners, minlength=num_owners).cumsum().tolist()
    sorted_values = order if values is None else values[order]
    return [sorted_values[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
