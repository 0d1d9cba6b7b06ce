"""Makes a deal of units over seats more even: exchanges between a heavy seat and lighter ones.

Shape letters: `U` units, the costliest first; `S` seats.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from spmdrl.types import Integers

_MAX_PARTNERS = 8
"""Light seats, of the node and of others, that are tried for an exchange; where they don't help, few others do."""


def split_by(owners: Integers, num_owners: int, *, values: Integers | None = None) -> list[Integers]:
    """The values (default: positions) of each owner, in their order."""
    # numpy sorts 16 bits in linear time.
    order = np.argsort(owners.astype(np.uint16) if num_owners <= 2**16 else owners, kind="stable")
    ends = np.bincount(owners, minlength=num_owners).cumsum().tolist()
    sorted_values = order if values is None else values[order]
    return [sorted_values[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def even_out(seats_U: Integers, costs_U: Integers, loads_S: list[int], *, nodes_S: Integers, limit: int) -> Integers:
    """Exchange units until no seat carries more than `limit` or nothing helps the heaviest; returns seats of units.

    Exchanges inside a node come first, as they are free; then a move to another node, of the cheapest unit that will
    do; then exchanges across nodes.
    """
    if max(loads_S) <= limit:
        return seats_U
    deal = _Deal(seats_U, costs_U, loads_S, nodes_S.tolist())
    # What gets below the limit stays there. The bound is for deals that never get there, but a little nearer each time.
    for _ in range(4 * len(loads_S) + 64):
        exchange = deal.first_sufficient_exchange(limit)
        if exchange is None:
            break
        deal.carry_out(exchange)
    evened = np.empty_like(seats_U)
    for seat, units in enumerate(deal.units):
        evened[units] = seat
    return evened


class _Exchange(NamedTuple):
    """One seat gives a unit to another, and may get one back."""

    giver: int
    taker: int
    given: int
    returned: int | None
    heavier_load: int
    """of the two, afterwards"""


class _Deal:
    """Units and load of each seat."""

    def __init__(self, seats_U: Integers, costs_U: Integers, loads_S: list[int], nodes_S: list[int]):
        self.units = split_by(seats_U, len(loads_S))
        self._costs_U, self._loads_S, self._nodes_S = costs_U, list(loads_S), nodes_S

    def first_sufficient_exchange(self, limit: int) -> _Exchange | None:
        """The first that brings the heaviest seat to the limit, or the one that helps most; None: no need or use."""
        heaviest = max(self._loads_S)
        if heaviest <= limit:
            return None
        best = None
        for exchange in self._exchanges(self._loads_S.index(heaviest), limit):
            if exchange.heavier_load <= limit:
                return exchange
            if exchange.heavier_load < heaviest and (best is None or exchange.heavier_load < best.heavier_load):
                best = exchange
        return best

    def carry_out(self, exchange: _Exchange) -> None:
        given, returned = [exchange.given], [] if exchange.returned is None else [exchange.returned]
        for seat, gone, come in ((exchange.giver, given, returned), (exchange.taker, returned, given)):
            kept = self.units[seat][~np.isin(self.units[seat], gone)]
            self.units[seat] = np.sort(np.concatenate([kept, np.array(come, dtype=kept.dtype)]))
            self._loads_S[seat] = int(self._costs_U[self.units[seat]].sum())

    def _exchanges(self, giver: int, limit: int) -> Iterator[_Exchange]:
        """What the giver may try, the cheapest in bytes first."""
        lightest_first = sorted(range(len(self._loads_S)), key=self._loads_S.__getitem__)
        nodes = self._nodes_S
        neighbours = [seat for seat in lightest_first if nodes[seat] == nodes[giver] and seat != giver]
        strangers = [seat for seat in lightest_first if nodes[seat] != nodes[giver]]
        for seat in neighbours[:_MAX_PARTNERS]:
            yield self._most_even_exchange(giver, seat)
        for seat in strangers[:1]:
            yield from self._least_move(giver, seat, limit)
        for seat in strangers[:_MAX_PARTNERS]:
            yield self._most_even_exchange(giver, seat)

    def _least_move(self, giver: int, taker: int, limit: int) -> Iterator[_Exchange]:
        """The move of the cheapest unit that brings the giver to the limit, if there is one."""
        costs = self._costs_U[self.units[giver]]
        load = self._loads_S[giver]
        num_sufficient = int((costs >= load - limit).sum())
        if num_sufficient:
            cost = int(costs[num_sufficient - 1])
            given = int(self.units[giver][num_sufficient - 1])
            yield _Exchange(giver, taker, given, None, max(load - cost, self._loads_S[taker] + cost))

    def _most_even_exchange(self, giver: int, taker: int) -> _Exchange:
        """The exchange, or move, that leaves the heavier of the two the lightest."""
        given_costs = self._costs_U[self.units[giver]]
        # Cheapest first; nothing at all costs nothing.
        returned_costs = np.concatenate([[0], self._costs_U[self.units[taker][::-1]]])
        load, other_load = self._loads_S[giver], self._loads_S[taker]
        above = np.searchsorted(returned_costs, given_costs - (load - other_load) // 2)
        candidates = np.stack([np.maximum(above - 1, 0), np.minimum(above, returned_costs.size - 1)])
        moved = given_costs - returned_costs[candidates]
        heavier = np.maximum(load - moved, other_load + moved)
        way, given = divmod(int(heavier.argmin()), given_costs.size)
        place = int(candidates[way, given])
        returned = int(self.units[taker][-place]) if place else None
        return _Exchange(giver, taker, int(self.units[giver][given]), returned, int(heavier[way, given]))
