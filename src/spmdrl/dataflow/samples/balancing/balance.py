"""Division of rows over ranks: pure functions of metadata with the same result on every rank.

    units -------------> nodes -----------------> seats ----------------> takers
    (rows or groups,     (the home, but for       (differencing in        (ranks; the seating
    costliest first)     surplus and strays)      a node, then local      changes with the step)
                                                  search over all)

All numbers are integers, so that ranks and platforms can't disagree by rounding. Arrays are [num_rows] or, by suffix,
[G] groups; arrays of units, seats and nodes are [num_units], [num_seats] and [num_nodes].
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from spmdrl.dataflow.samples.balancing.node_shares import Seats, Units, nodes_of_units, split_by
from spmdrl.nouns.batch import Integers
from spmdrl.nouns.partition import largest_differencing

SLACK_PERCENT = 2
"""Largest load of the heaviest taker above the mean before rows leave their node."""
MOST_GROUPS_PERCENT = 125
"""Largest number of groups of a taker for generation, relative to the mean, rounded up; its first one is extra."""


@dataclass(frozen=True)
class Taker:
    """A rank that takes rows, and its node."""

    rank: int
    node: int


@dataclass(frozen=True)
class RowLoads:
    """Rows to deal, in any order, with their home nodes and their work in any unit; each is [B]."""

    rows: Integers
    homes: Integers
    costs: Integers

    def of_groups(self, group_size: int) -> RowLoads:
        """Return the loads of whole groups, by group number: the sum over the group's rows, which have one home."""
        groups, first, group_B = np.unique(self.rows // group_size, return_index=True, return_inverse=True)
        costs = np.zeros_like(groups)
        np.add.at(costs, group_B, self.costs)
        return RowLoads(groups, self.homes[first], costs)


def assign_rows(
    loads: RowLoads, takers: Sequence[Taker], *, seed: int, step: int, locality: bool = True, group_size: int = 1
) -> list[Integers]:
    """Deal rows over takers, each row once; returns ascending rows per taker, in the order of `takers`.

    The heaviest taker carries at most `SLACK_PERCENT` above the mean if no row costs more than that percentage of it,
    and mostly even if some do. Under this condition the fewest rows leave their node: its surplus over its takers'
    limits, rounded up to whole rows, and rows without a taker at home. Without `locality`, homes don't count. (seed,
    step) breaks ties between takers, so that no rank always gets the longest row.

    With a `group_size`, a taker gets all existing rows of a group, which has that many row numbers.
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
        # As if the job had a single node.
        takers, loads = [Taker(taker.rank, 0) for taker in takers], replace(loads, homes=np.zeros_like(loads.homes))
    seats = _seat(takers, seed=seed, step=step)
    # Rows ascend; among equal costs the first row comes first.
    ascending = np.argsort(loads.rows, kind="stable")
    order = ascending[np.argsort(-loads.costs[ascending], kind="stable")]
    units = Units(loads.costs[order], seats.number_nodes(loads.homes[order]))
    limit = _limit(units.costs, len(takers))
    nodes = nodes_of_units(units, seats, limit=limit)
    seat_of_unit = _seats_of_units(units.costs, nodes, seats)
    seat_of_unit = even_out(seat_of_unit, units.costs, nodes=seats.nodes, limit=limit)
    taker_of_row = np.empty_like(order)
    taker_of_row[order] = seats.takers[seat_of_unit]
    return split_by(taker_of_row[ascending], len(takers), values=loads.rows[ascending])


def assign_parts(
    loads: RowLoads,
    shared_B: Integers,
    takers: Sequence[Taker],
    *,
    seed: int,
    step: int,
    locality: bool,
    group_size: int,
) -> list[Integers]:
    """Deal like `assign_rows` if a group's rows at one taker share a part of their costs, `shared_B`.

    Rows are dealt in whole groups, else in halves of groups, and so on, with shared costs counted once per part: in the
    largest parts with which the heaviest taker carries at most `SLACK_PERCENT` above the mean.
    """
    part_size = group_size if shared_B.any() else 1
    while part_size > 1:
        part_B = loads.rows // group_size * group_size + loads.rows % group_size // part_size
        parts, first, place_B = np.unique(part_B, return_index=True, return_inverse=True)
        costs = np.zeros_like(parts)
        np.maximum.at(costs, place_B, shared_B)
        np.add.at(costs, place_B, loads.costs - shared_B)
        dealt = assign_rows(RowLoads(parts, loads.homes[first], costs), takers, seed=seed, step=step, locality=locality)
        heaviest = max(int(costs[np.searchsorted(parts, own)].sum()) for own in dealt)
        if heaviest * 100 * len(takers) <= int(costs.sum()) * (100 + SLACK_PERCENT):
            return [np.sort(loads.rows[np.isin(part_B, own)]) for own in dealt]
        part_size //= 2
    return assign_rows(loads, takers, seed=seed, step=step, locality=locality)


def most_groups_each(num_groups: int, num_takers: int) -> int:
    """Return the largest number of groups per taker for generation, to which many short ones may add up.

    It bounds the KV cache that a taker needs, since every response may turn out to be the longest.
    """
    others = max(0, num_groups - num_takers)
    return min(num_groups, 1 - (-others * MOST_GROUPS_PERCENT // (100 * num_takers)))


def deal_groups(
    costs_G: Sequence[int], places_G: Sequence[int], takers: Sequence[Taker], *, seed: int, step: int
) -> Integers:
    """Deal whole groups for generation; returns each group's taker as an index into `takers` [G].

    A pending group has its taker's place in `places_G`, and stays there; the others have -1. These go, costliest first,
    to the taker with the least cost so far that may get one more (`most_groups_each`); nodes take turns among equals.
    """
    if not takers:
        raise ValueError(f"{len(costs_G)} groups have no taker; name at least one rank that generates")
    out, counts, loads = np.array(places_G, dtype=np.int64), [0] * len(takers), [0] * len(takers)
    for place, cost in zip(places_G, costs_G, strict=True):
        if place >= 0:
            counts[place] += 1
            loads[place] += cost
    most = most_groups_each(len(costs_G), len(takers))
    seats = _seats_by_turns(_seat(takers, seed=seed, step=step))
    heap = [(loads[place], seat, place) for seat, place in enumerate(seats) if counts[place] < most]
    heapq.heapify(heap)
    for group in sorted(np.flatnonzero(out < 0).tolist(), key=lambda group: -costs_G[group]):
        load, seat, place = heap[0]
        out[group] = place
        counts[place] += 1
        if counts[place] < most:
            heapq.heapreplace(heap, (load + costs_G[group], seat, place))
        else:
            heapq.heappop(heap)
    return out


def _seats_by_turns(seats: Seats) -> list[int]:
    """Order the seats' takers with nodes taking turns: the first of every node, then the second ones."""
    num_before = [0] * seats.num_nodes
    turns = []
    for node in seats.nodes.tolist():
        turns.append(num_before[node])
        num_before[node] += 1
    order: list[int] = seats.takers[np.argsort(turns, kind="stable")].tolist()
    return order


def _scramble(*counters: int) -> int:
    """Return an integer hash of the counters, the same on every platform."""
    return int.from_bytes(hashlib.blake2b(repr(counters).encode(), digest_size=8).digest(), "big")


def _seat(takers: Sequence[Taker], *, seed: int, step: int) -> Seats:
    """Order takers by a hash of (seed, step, rank), and number the nodes from 0 in order of their first seat."""
    order = sorted(range(len(takers)), key=lambda number: (_scramble(seed, step, takers[number].rank), number))
    numbers: dict[int, int] = {}
    nodes = [numbers.setdefault(takers[number].node, len(numbers)) for number in order]
    return Seats(np.array(order), np.array(nodes), numbers)


def _limit(costs: Integers, num_takers: int) -> int:
    """Return the heaviest taker's limit: the mean and its slack, or more if no deal of these units can meet it.

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


_MAX_PARTNERS = 8
"""Number of light seats, of the node and of others, tried for an exchange; if they don't help, few others do."""


class _Exchange(NamedTuple):
    """Exchange in which one seat gives a unit to another, and gets one or none back."""

    heavier_load: int
    """larger load of the two afterwards"""
    taker: int
    given: Integers
    returned: Integers


def even_out(seats: Integers, costs: Integers, *, nodes: Integers, limit: int) -> Integers:
    """Exchange units of the heaviest seat until it carries no more than `limit` or nothing helps; returns seats.

    `seats` and `costs` are by unit, `nodes` by seat. The first exchange that reaches the limit is made, else the most
    helpful one. Exchanges inside a node come first, as they are free.
    """
    loads = np.zeros(nodes.size, dtype=np.int64)
    np.add.at(loads, seats, costs)
    if loads.max() <= limit:
        return seats
    units = split_by(seats, nodes.size)
    # A seat below the limit stays there. The bound ends deals that only creep towards it.
    for _ in range(4 * nodes.size + 64):
        giver = int(loads.argmax())
        best = None
        for taker in _partners(giver, loads, nodes) if loads[giver] > limit else ():
            exchange = _most_even_exchange(units[giver], units[taker], costs, taker)
            if best is None or exchange.heavier_load < best.heavier_load:
                best = exchange
            if best.heavier_load <= limit:
                break
        if best is None or best.heavier_load >= loads[giver]:
            break
        for seat, gone, come in ((giver, best.given, best.returned), (best.taker, best.returned, best.given)):
            units[seat] = np.union1d(np.setdiff1d(units[seat], gone), come)
            loads[seat] = costs[units[seat]].sum()
    evened = np.empty_like(seats)
    for seat, own in enumerate(units):
        evened[own] = seat
    return evened


def _partners(giver: int, loads: Integers, nodes: Integers) -> list[int]:
    """Return the seats to try, the lightest first: some of the giver's node, then some of others."""
    others = np.argsort(loads, kind="stable")
    others = others[others != giver]
    is_near = nodes[others] == nodes[giver]
    return [*others[is_near][:_MAX_PARTNERS].tolist(), *others[~is_near][:_MAX_PARTNERS].tolist()]


def _most_even_exchange(own: Integers, others: Integers, costs: Integers, taker: int) -> _Exchange:
    """Return the exchange, or move, of units of two seats that leaves the heavier of the two the lightest."""
    given_costs = costs[own]
    # Cheapest first; nothing at all costs nothing.
    returned_costs = np.concatenate([[0], costs[others[::-1]]])
    load, other_load = given_costs.sum(), returned_costs.sum()
    above = np.searchsorted(returned_costs, given_costs - (load - other_load) // 2)
    candidates = np.stack([np.maximum(above - 1, 0), np.minimum(above, returned_costs.size - 1)])
    moved = given_costs - returned_costs[candidates]
    heavier = np.maximum(load - moved, other_load + moved)
    way, given = divmod(int(heavier.argmin()), given_costs.size)
    place = int(candidates[way, given])
    returned = others[::-1][place - 1 : place] if place else others[:0]
    return _Exchange(int(heavier[way, given]), taker, own[given : given + 1], returned)
