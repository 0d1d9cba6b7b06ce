"""The samples of one step: payload in warehouses, shares decided by controllers that every rank replicates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spmdrl.dataflow.samples.assign import Taker, TokenCost, assign_rows
from spmdrl.dataflow.samples.controller import Controller, RowStatus
from spmdrl.dataflow.samples.metadata import (
    Integers,
    News,
    RowDrop,
    RowMetadata,
    announced_lengths,
    pack_news,
    unpack_news,
)
from spmdrl.dataflow.samples.schema import check_column, check_columns, columns_mask, empty_batch, length_column
from spmdrl.dataflow.samples.sharing import SHARED_STATES, RowGroups
from spmdrl.dataflow.samples.transport import Transport
from spmdrl.resources.collectives import barrier, gather_ragged
from spmdrl.resources.world import World
from spmdrl.types import Batch, WorkerState


@dataclass(frozen=True)
class Accounting:
    """What became of the rows of a closed batch; every row is in exactly one place."""

    step: int
    num_trained: int
    num_dropped: Mapping[str, int]
    """Rows by the reason for which they were dropped."""


@dataclass(frozen=True)
class DockParts:
    """What the samples of every step use."""

    world: World
    needs_by_state: Mapping[WorkerState, frozenset[str]]
    transport: Transport
    cost: TokenCost
    row_groups: RowGroups | None = None
    """ranks that work on the same rows in the states of training engines; None: each rank on its own"""

    @property
    def takers(self) -> list[Taker]:
        """Every rank, with its node."""
        return [Taker(rank, self.world.launch.node_of(rank)) for rank in range(self.world.size)]

    def sharing(self, state: WorkerState) -> RowGroups | None:
        """How ranks share the rows of this state, if they do."""
        return self.row_groups if state in SHARED_STATES else None


class Samples:
    """The rows of one step. Row r is response r % group_size of prompt r // group_size.

    Its methods decide alike on every rank, so every rank calls them in the same order; only `put` and `mark_dropped`
    are a rank's own business, and others learn of them at the next `commit`.
    """

    def __init__(self, dock: DockParts, step: int, num_rows: int, group_size: int):
        self.step = step
        self.num_rows = num_rows
        self.group_size = group_size
        self._dock = dock
        self._controllers = {
            state: Controller(state, needs, num_rows=num_rows, group_size=group_size)
            for state, needs in dock.needs_by_state.items()
        }
        self._mine: dict[WorkerState, Integers] = {}
        self._generated: list[list[int]] = []
        self._news: list[News] = []
        self._dropped: dict[int, str] = {}
        self._prompts_are_stored = False

    def put_prompts(self, prompts: Batch) -> None:
        """Store the prompts, one row each in prompt order, the same on every rank. Nothing is communicated.

        Groups are dealt over nodes in equal consecutive parts; a warehouse keeps a prompt once for its whole group.
        """
        num_groups = self.num_rows // self.group_size
        if len(prompts) != num_groups:
            raise ValueError(
                f"{len(prompts)} prompts x {self.group_size} responses = {len(prompts) * self.group_size} rows, but "
                f"the batch has {self.num_rows}; put one row for each of the {num_groups} prompts"
            )
        for name in prompts.names:
            check_column(prompts, name)
        rows = np.arange(self.num_rows)
        groups = rows // self.group_size
        homes = groups * self._dock.world.launch.num_nodes // num_groups
        self._store_own_prompts(prompts, groups, homes)
        columns = columns_mask(prompts.names)
        lengths = {name: prompts.lengths(name).numpy()[groups] for name in announced_lengths(columns)}
        self._observe(RowMetadata(rows, homes, columns, lengths))

    def deal_generation(self) -> list[int]:
        """The rows, in whole groups, that this rank generates: ranks of a group's home node share its groups evenly."""
        controller = self._controllers[WorkerState.GENERATION]
        rows = controller.ready_rows(by_group=True)
        lengths = controller.lengths("prompt_ids")[rows]
        # Equal numbers of rows first, since responses cost most; then equal prompt lengths.
        costs = lengths + lengths.sum() + 1
        homes = controller.homes[rows]
        shares: list[list[int]] = [[] for _ in self._dock.takers]
        for node in np.unique(homes).tolist():
            takers = [taker for taker in self._dock.takers if taker.node == node]
            here = homes == node
            dealt = assign_rows(
                rows[here].tolist(), homes[here].tolist(), costs[here].tolist(), takers, self.group_size
            )
            for taker, mine in zip(takers, dealt, strict=True):
                shares[taker.rank] = mine
        self._generated = shares
        return self._claim(WorkerState.GENERATION, shares).tolist()

    def take(self, state: WorkerState, names: Iterable[str]) -> Batch:
        """Claim all rows that are ready for `state`, and return this rank's share of them with the named columns.

        Where ranks work on the same rows, the first of them takes and the others get what it took.
        """
        names = sorted(names)
        controller = self._controllers[state]
        undeclared = set(names) - controller.needs
        if undeclared:
            raise ValueError(
                f"{state.value} takes {sorted(undeclared)}, which its controller doesn't wait for; it waits for "
                f"{sorted(controller.needs)}: add them to what the state needs"
            )
        rows = controller.ready_rows()
        costs = self._dock.cost.of(self._num_tokens()[rows])
        homes = controller.homes[rows]
        groups = self._dock.sharing(state)
        takers = [taker for taker in self._dock.takers if groups is None or taker.rank in groups.leaders]
        dealt = assign_rows(rows.tolist(), homes.tolist(), costs.tolist(), takers)
        shares: list[list[int]] = [[] for _ in self._dock.takers]
        for taker, mine in zip(takers, dealt, strict=True):
            shares[taker.rank] = mine
        batch = self._fetch(self._claim(state, shares), names)
        return batch if groups is None else groups.share(batch)

    def take_generated(self, state: WorkerState) -> list[int]:
        """Claim all rows that are ready for `state`, each rank those that it generated, and move nothing."""
        assert self._generated, f"{state.value} takes what ranks generated, but nothing was dealt for generation yet"
        ready = set(self._controllers[state].ready_rows().tolist())
        shares = [[row for row in share if row in ready] for share in self._generated]
        return self._claim(state, shares).tolist()

    def read(self, rows: Sequence[int], names: Iterable[str]) -> Batch:
        """Look at columns of some rows without claiming them: for a report, say. Only this rank takes part."""
        return self._fetch(np.asarray(rows, dtype=np.int64), sorted(names))

    def is_trained(self, row: int) -> bool:
        """Whether the update has used this row."""
        return row in self._controllers[WorkerState.UPDATE].rows_with(RowStatus.CONSUMED)

    def put(self, state: WorkerState, batch: Batch) -> None:
        """Store columns that `state` made of rows that this rank took, each in the row's home.

        Where ranks work on the same rows, the rank that took them stores for all.
        """
        check_columns(batch, state)
        groups = self._dock.sharing(state)
        if groups is not None and not groups.is_leader:
            return
        host = Batch(batch.rows.cpu(), batch.data.detach().to("cpu"))
        rows = host.rows.numpy()
        strangers = rows[~np.isin(rows, self._mine.get(state, ()))]
        if strangers.size:
            rank = self._dock.world.rank
            raise ValueError(f"rank {rank} puts {state.value} columns of row {strangers[0]}, which it didn't take")
        self._check_lengths(host)
        homes = self._controllers[state].homes[rows]
        for home in np.unique(homes).tolist():
            here = np.flatnonzero(homes == home)
            self._dock.transport.put(home, host if here.size == rows.size else host.select(torch.from_numpy(here)))
        columns = columns_mask(host.names)
        lengths = {name: host.lengths(name).numpy() for name in announced_lengths(columns)}
        self._news.append(RowMetadata(rows, homes, columns, lengths))

    def mark_dropped(self, rows: Sequence[int], reason: str) -> None:
        """Take rows out of the batch from the next `commit` on; of several ranks' reasons the first rank's counts."""
        if len(rows):
            self._news.append(RowDrop(np.asarray(rows, dtype=np.int64), reason))

    def commit(self, state: WorkerState) -> None:
        """Tell all ranks what was put and dropped, and end the claims of `state`. Collective over all ranks."""
        packed = torch.from_numpy(pack_news(self._news))
        self._news.clear()
        gathered = gather_ragged(packed)
        self._prompts_are_stored = True
        self._dock.transport.volume.metadata_bytes += 8 * (sum(part.numel() for part in gathered) - packed.numel())
        controller = self._controllers[state]
        controller.consume(controller.rows_with(RowStatus.CLAIMED))
        for part in gathered:
            for entry in unpack_news(part.numpy()):
                self._observe(entry)

    def lengths(self, name: str) -> Tensor:
        """Row lengths [num_rows] of a ragged column, from metadata; 0 where it isn't there."""
        return torch.from_numpy(self._controllers[WorkerState.UPDATE].lengths(name).clip(min=0))

    def account(self) -> Accounting:
        """Where every row ended; one that was neither trained nor dropped is a RuntimeError."""
        controller = self._controllers[WorkerState.UPDATE]
        trained = controller.rows_with(RowStatus.CONSUMED)
        accounted = np.concatenate([trained, controller.rows_with(RowStatus.DROPPED)])
        lost = np.setdiff1d(np.arange(self.num_rows), accounted)
        if lost.size:
            raise RuntimeError(
                f"step {self.step}: {lost.size} of {self.num_rows} rows were neither trained nor dropped; "
                f"row {lost[0]} {controller.describe(lost[0])}"
            )
        reasons = [self._dropped[row] for row in sorted(self._dropped)]
        return Accounting(self.step, trained.size, {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)})

    def _store_own_prompts(self, prompts: Batch, groups: Integers, homes: Integers) -> None:
        warehouse = self._dock.transport.own_warehouse
        own_rows = np.flatnonzero(homes == self._dock.world.node)
        if warehouse is None or not own_rows.size:
            return
        own_groups = np.unique(groups[own_rows])
        kept = prompts.select(torch.from_numpy(own_groups))
        warehouse.put(kept, positions=groups[own_rows] - own_groups[0], rows=own_rows)

    def _observe(self, entry: News) -> None:
        for controller in self._controllers.values():
            if isinstance(entry, RowDrop):
                controller.drop(entry.rows)
            else:
                controller.observe(entry)
        if isinstance(entry, RowDrop):
            for row in entry.rows.tolist():
                self._dropped.setdefault(row, entry.reason)

    def _claim(self, state: WorkerState, shares: list[list[int]]) -> Integers:
        """Claim every rank's share here too, and return this rank's."""
        self._controllers[state].claim([row for share in shares for row in share])
        mine = np.asarray(shares[self._dock.world.rank] if shares else [], dtype=np.int64)
        self._mine[state] = np.union1d(self._mine.get(state, mine), mine)
        return mine

    def _fetch(self, rows: Integers, names: list[str]) -> Batch:
        if not self._prompts_are_stored:
            # Until the first commit, another rank's warehouse may still be without this step's prompts.
            barrier()
            self._prompts_are_stored = True
        if not rows.size:
            return empty_batch(names)
        homes = self._controllers[WorkerState.UPDATE].homes[rows]
        parts = [
            self._dock.transport.get(home, torch.from_numpy(rows[homes == home]), names)
            for home in np.unique(homes).tolist()
        ]
        if len(parts) == 1:
            return parts[0]
        joined = Batch.concatenate(parts)
        return joined.select(joined.rows.argsort())

    def _num_tokens(self) -> Integers:
        return (self.lengths("prompt_ids") + self.lengths("response_ids")).numpy()

    def _check_lengths(self, batch: Batch) -> None:
        """Refuse a column whose rows aren't as long as those of the column that it goes with."""
        for name in batch.names:
            if not batch.is_ragged(name) or length_column(name) == name:
                continue
            other = length_column(name)
            expected = batch.lengths(other) if other in batch else self.lengths(other)[batch.rows]
            wrong = (batch.lengths(name) != expected).nonzero().flatten()
            if wrong.numel():
                at = int(wrong[0])
                raise ValueError(
                    f"column {name!r} has {int(batch.lengths(name)[at])} values in row {int(batch.rows[at])}, but "
                    f"{other!r} has {int(expected[at])}; put one value for each of its tokens"
                )
