"""Shares of ranks in a step's batch, by the pure functions of balance; groups of ranks that work on the same rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from spmdrl.dataflow.samples.balancing.balance import RowLoads, Taker, assign_parts, assign_rows, deal_groups
from spmdrl.dataflow.samples.balancing.node_shares import split_by
from spmdrl.dataflow.samples.catalogue import Catalogue
from spmdrl.dataflow.samples.store.frame import pack, read_frame
from spmdrl.nouns.batch import Batch, Integers, WorkerState
from spmdrl.nouns.partition import TOKENS, RowCost, shares_prompt
from spmdrl.resources.collectives import broadcast_ragged
from spmdrl.resources.mesh import Axis, GenerationMesh, UpdateMesh
from spmdrl.runtime.launch import LaunchEnvironment

Shares = Mapping[int, Integers]
"""Rows by rank, for ranks that have some."""


@dataclass(frozen=True)
class RowGroups:
    """Groups of ranks that work on the same rows."""

    leaders: tuple[int, ...]
    """rank of each group that takes rows and puts columns"""
    members: Axis
    """this rank's group, its leader first"""
    device: torch.device = torch.device("cpu")
    """device that shared rows travel between: accelerators use their own links"""

    @property
    def is_leader(self) -> bool:
        return self.members.rank == 0

    @property
    def leader(self) -> int:
        """Rank that takes rows for this rank."""
        return self.members.ranks[0]

    def share(self, batch: Batch | None) -> Batch:
        """Return the leader's batch, on every rank of the group. Collective over the group."""
        if self.members.size == 1:
            assert batch is not None, "the one rank of a group is its leader"
            return batch
        frame = None if batch is None else pack(batch)
        shared = broadcast_ragged(frame, self.leader, self.members.group, self.device)
        return read_frame(shared) if batch is None else batch


@dataclass(frozen=True)
class DealRules:
    """Inputs of every step's shares beside metadata."""

    launch: LaunchEnvironment
    seed: int
    cost: RowCost = TOKENS
    locality: bool = True
    row_groups: Mapping[WorkerState, RowGroups] = field(default_factory=dict)
    """groups of ranks by the states in which they work on the same rows; in other states each rank has its own"""
    whole_groups: frozenset[WorkerState] = frozenset()
    """states in which one rank takes all remaining rows of a group"""
    shares_prompts: bool = False
    """True if a group's rows on one rank compute their prompt once"""
    others: range | None = None
    """ranks that take rows in states without groups; None: all"""

    @property
    def homes(self) -> Integers:
        """Nodes that rows may live on, ascending: those whose ranks train."""
        nodes = range(self.launch.num_nodes) if self.others is None else map(self.launch.node_of, self.others)
        return np.unique(list(nodes))

    def takers(self, state: WorkerState) -> list[Taker]:
        """Return the ranks that take rows for a state, with their nodes."""
        groups, launch = self.row_groups.get(state), self.launch
        ranks: Sequence[int] = range(launch.world_size) if self.others is None else self.others
        if groups is not None:
            ranks = groups.leaders
        return [Taker(rank, launch.node_of(rank)) for rank in ranks]


def groups_of_training(meshes: Mapping[WorkerState, UpdateMesh], device: torch.device) -> dict[WorkerState, RowGroups]:
    """Return the groups of the layouts under which states score or train."""
    return {state: RowGroups(mesh.leaders, mesh.model, device) for state, mesh in meshes.items()}


def groups_of_generation(
    mesh: GenerationMesh, device: torch.device, state: WorkerState = WorkerState.GENERATION
) -> dict[WorkerState, RowGroups]:
    """Return the replicas of a generation layout, whose ranks generate the same rows."""
    return {state: RowGroups(mesh.leaders, mesh.tensor, device)}


@dataclass(frozen=True)
class GroupLengths:
    """Tokens of each group's prompt [G], and expected tokens of its responses."""

    prompts: Sequence[int]
    responses: Sequence[int] | None

    def costs(self, cost: RowCost, group_size: int) -> list[int]:
        """Return the cost of generating each group; without known lengths, equal numbers of groups come first."""
        if self.responses is None:
            most = sum(self.prompts) + 1
            return [most + length for length in self.prompts]
        pairs = zip(self.prompts, self.responses, strict=True)
        return [cost.of_group(num_prompt, num_response, group_size) for num_prompt, num_response in pairs]


@dataclass(frozen=True)
class _Deal:
    """Shares of rows, kept for the next state that takes the same rows."""

    rows: Integers
    lengths: Integers
    shares: Shares


class Dealer:
    """Dealer of one batch's rows; the same on every rank, as it depends only on metadata, seed and step."""

    def __init__(self, rules: DealRules, step: int, group_size: int):
        self._rules = rules
        self._step = step
        self._group_size = group_size
        self._deals: dict[tuple[int, tuple[Taker, ...]], _Deal] = {}
        self._taker_of_group = np.empty(0, dtype=np.int64)

    def deal_groups(self, groups: range, lengths: GroupLengths, holders: Sequence[int] = ()) -> Integers:
        """Deal groups for generation; returns each group's home node [G], with locality the one that generates it.

        The first groups are pending ones, which the ranks `holders` continue.
        """
        takers, rules = self._rules.takers(WorkerState.GENERATION), self._rules
        places = {taker.rank: place for place, taker in enumerate(takers)}
        begun = [places[rank] for rank in holders] + [-1] * (len(groups) - len(holders))
        if len(takers) == 1:
            dealt = np.zeros(len(groups), dtype=np.int64)
        else:
            costs = lengths.costs(rules.cost, self._group_size)
            dealt = deal_groups(costs, begun, takers, seed=rules.seed, step=self._step)
        known = self._taker_of_group
        self._taker_of_group = np.concatenate([known[: groups.start], dealt, known[groups.stop :]])
        if not rules.locality:
            # The paper's placement: all nodes in turn.
            return rules.homes[np.arange(groups.start, groups.stop) % rules.homes.size]
        nodes = np.array([taker.node for taker in takers])[dealt]
        # Rows that ranks on other nodes train on are stored there at once.
        return np.where(np.isin(nodes, rules.homes), nodes, rules.homes[dealt % rules.homes.size])

    def deal_generation(self, rows: Integers) -> Shares:
        """Return ascending rows of whole groups for the ranks that generate them."""
        takers = self._rules.takers(WorkerState.GENERATION)
        shares = split_by(self._taker_of_group[rows // self._group_size], len(takers), values=rows)
        return {taker.rank: share for taker, share in zip(takers, shares, strict=True)}

    def deal(self, state: WorkerState, rows: Integers, catalogue: Catalogue) -> Shares:
        """Return each rank's share of rows for a state."""
        takers = self._rules.takers(state)
        if len(takers) == 1:
            return {takers[0].rank: rows}
        prompts, responses = (catalogue.lengths(name)[rows].clip(min=0) for name in ("prompt_ids", "response_ids"))
        lengths = prompts + responses
        size = self._group_size if state in self._rules.whole_groups else 1
        known = self._deals.get((size, tuple(takers)))
        # States that take the same rows get the same shares; dealing a large batch takes a second.
        if known is not None and np.array_equal(known.rows, rows) and np.array_equal(known.lengths, lengths):
            return known.shares
        rules, costs = self._rules, self._rules.cost.of(lengths)
        # Leave room for sums of all and for percentages of these in 64 bits.
        shift = max(int(costs.max(initial=0)).bit_length() + rows.size.bit_length() - 54, 0)
        loads = RowLoads(rows, catalogue.homes[rows], costs >> shift)
        options: dict[str, Any] = {"seed": rules.seed, "step": self._step, "locality": rules.locality}
        if rules.shares_prompts and size == 1:
            shared = np.where(shares_prompt(prompts, responses), rules.cost.of(prompts) >> shift, 0)
            dealt = assign_parts(loads, shared, takers, group_size=self._group_size, **options)
        else:
            dealt = assign_rows(loads, takers, group_size=size, **options)
        shares = {taker.rank: mine for taker, mine in zip(takers, dealt, strict=True)}
        self._deals[size, tuple(takers)] = _Deal(rows, lengths, shares)
        return shares
