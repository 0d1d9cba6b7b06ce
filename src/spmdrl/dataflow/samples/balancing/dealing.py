"""Which ranks take which rows of a step's batch, by the pure functions of balance, and which work on the same ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from spmdrl.dataflow.samples.balancing.balance import (
    RowLoads,
    Taker,
    assign_rows,
    deal_groups,
    deal_new_groups,
    homes_of_groups,
)
from spmdrl.dataflow.samples.control.catalogue import Catalogue
from spmdrl.dataflow.samples.store.frame import pack, read_frame
from spmdrl.resources.collectives import broadcast_ragged
from spmdrl.resources.mesh import Axis, GenerationMesh, UpdateMesh
from spmdrl.resources.startup.launch import LaunchEnvironment
from spmdrl.types import Batch, Integers, WorkerState
from spmdrl.types.partition import TOKENS, RowCost

Shares = Mapping[int, Integers]
"""The rows of each rank that has some."""


@dataclass(frozen=True)
class RowGroups:
    """How ranks are grouped by the rows that they work on."""

    leaders: tuple[int, ...]
    """the rank of each group that takes rows and puts columns"""
    members: Axis
    """this rank's group, its leader first"""
    device: torch.device = torch.device("cpu")
    """where shared rows travel: between accelerators, by their own links"""

    @property
    def is_leader(self) -> bool:
        return self.members.rank == 0

    @property
    def leader(self) -> int:
        """The rank that takes rows for this rank."""
        return self.members.ranks[0]

    def share(self, batch: Batch | None) -> Batch:
        """The leader's batch, on every rank of the group. Collective over the group."""
        if self.members.size == 1:
            assert batch is not None, "the one rank of a group is its leader"
            return batch
        frame = None if batch is None else pack(batch)
        shared = broadcast_ragged(frame, self.leader, self.members.group, self.device)
        return read_frame(shared) if batch is None else batch


@dataclass(frozen=True)
class DealRules:
    """What the shares of every step depend on, besides metadata."""

    launch: LaunchEnvironment
    seed: int
    cost: RowCost = TOKENS
    locality: bool = True
    row_groups: Mapping[WorkerState, RowGroups] = field(default_factory=dict)
    """in which states ranks work on the same rows; in others, each rank works on its own"""
    whole_groups: frozenset[WorkerState] = frozenset()
    """the states in which one rank takes all rows that are left of a group"""

    def takers(self, state: WorkerState) -> list[Taker]:
        """The ranks that take rows for a state, with their nodes."""
        groups, launch = self.row_groups.get(state), self.launch
        ranks = range(launch.world_size) if groups is None else groups.leaders
        return [Taker(rank, launch.node_of(rank)) for rank in ranks]

    def homes(self, num_groups: int, step: int) -> Integers:
        """The home node of each group [G] of a step."""
        if self.launch.num_nodes == 1:
            return np.zeros(num_groups, dtype=np.int64)
        generating = [taker.node for taker in self.takers(WorkerState.GENERATION)]
        num_takers = np.bincount(generating, minlength=self.launch.num_nodes)
        return homes_of_groups(num_groups, num_takers, seed=self.seed, step=step, locality=self.locality)


def groups_of_training(meshes: Mapping[WorkerState, UpdateMesh], device: torch.device) -> dict[WorkerState, RowGroups]:
    """The groups of the layouts under which states score or train."""
    return {state: RowGroups(mesh.leaders, mesh.model, device) for state, mesh in meshes.items()}


def groups_of_generation(
    mesh: GenerationMesh, device: torch.device, state: WorkerState = WorkerState.GENERATION
) -> dict[WorkerState, RowGroups]:
    """The replicas of a generation layout, whose ranks answer the same prompts."""
    return {state: RowGroups(mesh.leaders, mesh.tensor, device)}


@dataclass(frozen=True)
class _Deal:
    """Who takes which of some rows; kept for the next state that takes the same ones."""

    rows: Integers
    lengths: Integers
    shares: Shares


class Dealer:
    """Deals the rows of one batch; the same on every rank, as it depends on metadata, seed and step only."""

    def __init__(self, rules: DealRules, step: int, group_size: int):
        self._rules = rules
        self._step = step
        self._group_size = group_size
        self._deals: dict[tuple[int, tuple[Taker, ...]], _Deal] = {}
        self._carried: list[Integers] | None = None

    def deal_homes(self, lengths_G: Integers, holders: Sequence[int]) -> Integers:
        """The home node of each group [G]; the first groups were begun before, on the ranks `holders`, which keep them.

        With locality they live where they are generated.
        """
        if not holders:
            return self._rules.homes(lengths_G.size, self._step)
        takers = self._rules.takers(WorkerState.GENERATION)
        places = {taker.rank: place for place, taker in enumerate(takers)}
        taker_of_group = np.full(lengths_G.size, -1, dtype=np.int64)
        taker_of_group[: len(holders)] = [places[rank] for rank in holders]
        self._carried = deal_new_groups(taker_of_group, lengths_G, takers, seed=self._rules.seed, step=self._step)
        if not self._rules.locality:
            return self._rules.homes(lengths_G.size, self._step)
        homes = np.empty_like(taker_of_group)
        for taker, groups in zip(takers, self._carried, strict=True):
            homes[groups] = taker.node
        return homes

    def deal_generation(self, rows: Integers, catalogue: Catalogue) -> Shares:
        """Rows of whole groups, ascending, for the ranks that generate them."""
        takers = self._rules.takers(WorkerState.GENERATION)
        if len(takers) == 1:
            return {takers[0].rank: rows}
        first = rows[:: self._group_size]
        dealt = self._carried
        if dealt is None:
            dealt = deal_groups(
                catalogue.homes[first],
                catalogue.lengths("prompt_ids")[first],
                takers,
                seed=self._rules.seed,
                step=self._step,
                locality=self._rules.locality,
            )
        within = np.arange(self._group_size)
        return {taker.rank: (first[groups, None] + within).ravel() for taker, groups in zip(takers, dealt, strict=True)}

    def deal(self, state: WorkerState, rows: Integers, catalogue: Catalogue) -> Shares:
        """Rows for the ranks that take them for a state."""
        takers = self._rules.takers(state)
        if len(takers) == 1:
            return {takers[0].rank: rows}
        lengths = (catalogue.lengths("prompt_ids").clip(min=0) + catalogue.lengths("response_ids").clip(min=0))[rows]
        size = self._group_size if state in self._rules.whole_groups else 1
        known = self._deals.get((size, tuple(takers)))
        # States that take the same rows get the same shares, and a large batch takes a second to deal.
        if known is not None and np.array_equal(known.rows, rows) and np.array_equal(known.lengths, lengths):
            return known.shares
        costs = self._rules.cost.of(lengths)
        # Leave room for sums of all and for percentages of these in 64 bits.
        costs >>= max(int(costs.max(initial=0)).bit_length() + rows.size.bit_length() - 54, 0)
        dealt = assign_rows(
            RowLoads(rows, catalogue.homes[rows], costs, lengths),
            takers,
            group_size=size,
            seed=self._rules.seed,
            step=self._step,
            locality=self._rules.locality,
        )
        shares = {taker.rank: mine for taker, mine in zip(takers, dealt, strict=True)}
        self._deals[size, tuple(takers)] = _Deal(rows, lengths, shares)
        return shares
