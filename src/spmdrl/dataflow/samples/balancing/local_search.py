"""Local search: exchanges of units between seats if a deal leaves a seat above the limit.

Units are numbered from the costliest on; arrays of seats and nodes are [num_units] and [num_seats].
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from spmdrl.dataflow.samples.balancing.node_shares import split_by
from spmdrl.nouns.batch import Integers

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
