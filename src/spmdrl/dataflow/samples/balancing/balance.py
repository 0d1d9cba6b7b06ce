"""Who works on which rows: pure functions of metadata, which every rank evaluates alike.

    units -------------> nodes -----------------> seats ----------------> takers
    (rows or groups,     (the home, but for       (differencing in        (ranks; the seating
    costliest first)     surplus and strays)      a node, then local      changes with the step)
                                                  search over all)

All numbers are integers, so that no rounding can make two ranks or platforms disagree. Arrays are [num_rows] or, by
suffix, [G] groups; those of units, seats and nodes are [num_units], [num_seats] and [num_nodes].
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from spmdrl.dataflow.samples.balancing.local_search import even_out
from spmdrl.dataflow.samples.balancing.node_shares import Seats, Units, nodes_of_units, split_by
from spmdrl.types import Integers
from spmdrl.types.partition import largest_differencing

SLACK_PERCENT = 2
"""What the heaviest taker may carry above the mean before rows leave their node."""


@dataclass(frozen=True)
class Taker:
    """A rank that takes rows, and its node."""

    rank: int
    node: int


@dataclass(frozen=True)
class RowLoads:
    """Rows to deal, in any order, with their home nodes, their work in any unit, and their tokens; each is [B]."""

    rows: Integers
    homes: Integers
    costs: Integers
    lengths: Integers

    def of_groups(self, group_size: int) -> RowLoads:
        """The same by the number of the group that rows belong to: what all rows of a group, with one home, cost."""
        groups, first, group_B = np.unique(self.rows // group_size, return_index=True, return_inverse=True)
        costs, lengths = np.zeros_like(groups), np.zeros_like(groups)
        np.add.at(costs, group_B, self.costs)
        np.add.at(lengths, group_B, self.lengths)
        return RowLoads(groups, self.homes[first], costs, lengths)


def assign_rows(
    loads: RowLoads,
    takers: Sequence[Taker],
    *,
    seed: int,
    step: int,
    locality: bool = True,
    group_size: int = 1,
) -> list[Integers]:
    """Deal rows over takers, each row once; returns ascending rows per taker, in the order of `takers`.

    The heaviest taker carries at most `SLACK_PERCENT` above the mean wherever no row costs more than that percentage of
    it, and mostly where some do. Under this condition little leaves its node: its surplus over what its takers may
    carry, which no deal can avoid, rounded up to whole rows; and what has no taker at home. Without `locality`, homes
    don't count. (seed, step) decides between equal takers, so that no rank always gets the longest row.

    With a `group_size`, a taker gets all rows of a group, each with so many row numbers, that there are.
    """
    if not takers:
        raise ValueError(f"{loads.rows.size} rows have no taker; name at least one rank that takes them")
    if group_size > 1:
        dealt = assign_rows(loads.of_groups(group_size), takers, seed=seed, step=step, locality=locality)
        rows = np.sort(loads.rows)
        return [rows[np.isin(rows // group_size, groups)] for groups in dealt]
    if not loads.rows.size:
        return [loads.rows] * len(takers)
    if not locality:
        takers, homes = _on_one_node(takers, loads.homes)
        loads = replace(loads, homes=homes)
    seats = _seat(takers, seed=seed, step=step)
    # Ascending rows, and of equal costs the first row first.
    ascending = np.argsort(loads.rows, kind="stable")
    order = ascending[np.argsort(-loads.costs[ascending], kind="stable")]
    units = Units(loads.costs[order], loads.lengths[order], seats.number_nodes(loads.homes[order]))
    limit = _limit(units.costs, len(takers))
    nodes = nodes_of_units(units, seats, limit=limit)
    seat_of_unit = _seats_of_units(units.costs, nodes, seats)
    seat_of_unit = even_out(seat_of_unit, units.costs, nodes=seats.nodes, limit=limit)
    taker_of_row = np.empty_like(order)
    taker_of_row[order] = seats.takers[seat_of_unit]
    return split_by(taker_of_row[ascending], len(takers), values=loads.rows[ascending])


def deal_groups(
    homes_G: Integers, lengths_G: Integers, takers: Sequence[Taker], *, seed: int, step: int, locality: bool = True
) -> list[Integers]:
    """Deal whole groups for generation: ascending positions of groups per taker, in the order of `takers`.

    The takers of a group's home node share its groups evenly: equal numbers first, since responses cost most, then
    equal prompt lengths. A group without a taker at home goes to the node with the fewest groups per taker. Without
    `locality`, homes don't count.
    """
    if not takers:
        raise ValueError(f"{homes_G.size} groups have no taker; name at least one rank that generates")
    if not homes_G.size:
        return [homes_G] * len(takers)
    if not locality:
        takers, homes_G = _on_one_node(takers, homes_G)
    seats = _seat(takers, seed=seed, step=step)
    order = np.argsort(-lengths_G, kind="stable")
    lengths = lengths_G[order]
    units = Units(lengths + (lengths_G.sum() + 1), lengths, seats.number_nodes(homes_G[order]))
    # A limit that no rank can reach, so that all units stay at home.
    nodes = nodes_of_units(units, seats, limit=int(units.costs.sum()))
    seat_of_unit = _seats_of_units(units.costs, nodes, seats)
    taker_of_group = np.empty_like(order)
    taker_of_group[order] = seats.takers[seat_of_unit]
    return split_by(taker_of_group, len(takers))


def deal_new_groups(
    taker_of_group: Integers, lengths_G: Integers, takers: Sequence[Taker], *, seed: int, step: int
) -> list[Integers]:
    """Deal groups of which some have a taker already (its position in `takers`, -1 where there is none).

    The others go, the longest prompt first, to the taker with the fewest groups, then the fewest prompt tokens. Returns
    ascending positions of groups per taker, in the order of `takers`.
    """
    seats = _seat(takers, seed=seed, step=step)
    taken = taker_of_group >= 0
    counts = np.bincount(taker_of_group[taken], minlength=len(takers)).tolist()
    tokens = np.bincount(taker_of_group[taken], weights=lengths_G[taken], minlength=len(takers)).tolist()
    heap = [(counts[taker], int(tokens[taker]), seat, taker) for seat, taker in enumerate(seats.takers.tolist())]
    heapq.heapify(heap)
    out = taker_of_group.copy()
    new = np.flatnonzero(~taken)
    for group in new[np.argsort(-lengths_G[new], kind="stable")].tolist():
        count, length, seat, taker = heap[0]
        heapq.heapreplace(heap, (count + 1, length + int(lengths_G[group]), seat, taker))
        out[group] = taker
    return split_by(out, len(takers))


def homes_of_groups(num_groups: int, num_takers: Integers, *, seed: int, step: int, locality: bool = True) -> Integers:
    """The home node of each group [G]: consecutive parts, as large as the node has ranks that generate, `num_takers`.

    What remains goes to other such nodes each step. Without `locality`, groups go round all nodes in turn, as the paper
    stores them.
    """
    groups = np.arange(num_groups, dtype=np.int64)
    if not locality:
        return groups % num_takers.size
    nodes = np.flatnonzero(num_takers)
    parts = num_groups * num_takers[nodes] // num_takers.sum()
    has_one_more = (np.arange(nodes.size) + _scramble(seed, step) % nodes.size) % nodes.size < num_groups - parts.sum()
    return np.repeat(nodes, parts + has_one_more)


def _scramble(*counters: int) -> int:
    """An integer that depends on all counters, the same on every platform."""
    return int.from_bytes(hashlib.blake2b(repr(counters).encode(), digest_size=8).digest(), "big")


def _on_one_node(takers: Sequence[Taker], homes: Integers) -> tuple[list[Taker], Integers]:
    """The same takers and homes as if the job had a single node."""
    return [Taker(taker.rank, 0) for taker in takers], np.zeros_like(homes)


def _seat(takers: Sequence[Taker], *, seed: int, step: int) -> Seats:
    """Order takers by a hash of (seed, step, rank), and number the nodes from 0 in order of their first seat."""
    order = sorted(range(len(takers)), key=lambda number: (_scramble(seed, step, takers[number].rank), number))
    numbers: dict[int, int] = {}
    nodes = [numbers.setdefault(takers[number].node, len(numbers)) for number in order]
    return Seats(np.array(order), np.array(nodes), numbers)


def _limit(costs: Integers, num_takers: int) -> int:
    """What the heaviest taker may carry: the mean and its slack, or more where no deal of these units can do with it.

    Of the k * num_takers + 1 costliest units, some taker carries at least k + 1.
    """
    sums = np.concatenate([[0], costs.cumsum()])
    total = int(sums[-1])
    ends = np.arange(1, costs.size + 1, num_takers)
    unavoidable = int((sums[ends] - sums[ends - 1 - np.arange(ends.size)]).max())
    return max(total * (100 + SLACK_PERCENT) // (100 * num_takers), -(-total // num_takers), unavoidable)


def _seats_of_units(costs: Integers, nodes: Integers, seats: Seats) -> Integers:
    """Spread each node's units evenly over its seats, the heaviest share to the first; returns seats of units."""
    out = np.empty_like(nodes)
    seats_by_node = split_by(seats.nodes, seats.num_nodes)
    for own_seats, units in zip(seats_by_node, split_by(nodes, seats.num_nodes), strict=True):
        shares = largest_differencing(costs[units].tolist(), own_seats.size)
        for seat, share in zip(own_seats.tolist(), shares, strict=True):
            out[units[share]] = seat
    return out
