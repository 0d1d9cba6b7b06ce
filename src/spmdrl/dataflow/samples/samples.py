"""The samples of one step: payload in warehouses, shares decided by controllers that every rank replicates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.samples.balancing.dealing import Dealer, DealRules, Shares
from spmdrl.dataflow.samples.control.controller import RowStatus
from spmdrl.dataflow.samples.control.row_lives import DEFERRED, Accounting, Arrays, RowLives, restored
from spmdrl.dataflow.samples.control.row_news import (
    News,
    RowDrop,
    RowMetadata,
    announced_lengths,
    joined,
    pack_news,
    unpack_news,
)
from spmdrl.dataflow.samples.schema import (
    check_columns,
    columns_mask,
    length_column,
)
from spmdrl.dataflow.samples.store.keeping import read_columns, read_lives, write_columns, write_lives
from spmdrl.dataflow.samples.transport.payload import Payload
from spmdrl.dataflow.samples.transport.transport import Transport
from spmdrl.resources.collectives import barrier, gather_ragged
from spmdrl.resources.world import World
from spmdrl.types import Batch, Integers, WorkerState, offsets_of


@dataclass(frozen=True)
class DockParts:
    """What the samples of every step use."""

    world: World
    needs_by_state: Mapping[WorkerState, frozenset[str]]
    transport: Transport
    rules: DealRules


class Samples:
    """The rows of one step. Row r is response r % group_size of prompt r // group_size.

    Its methods decide alike on every rank, so every rank calls them in the same order; only `put`, `mark_dropped` and
    `read` are local to a rank, and what they change becomes known to all at the next `commit`.
    """

    def __init__(
        self, dock: DockParts, step: int, prompts: Sequence[Prompt], group_size: int, holders: Sequence[int]
    ):  # fmt: skip
        self.step = step
        self.prompts = prompts
        self.group_size = group_size
        self.num_rows = num_rows = len(prompts) * group_size
        self._dock = dock
        self._lives = RowLives(dock.needs_by_state, step=step, num_rows=num_rows, group_size=group_size)
        self._dealer = Dealer(dock.rules, step, group_size)
        self._payload = Payload(dock.transport, dock.world, self._lives.catalogue)
        dock.transport.warehouse.open(num_rows)
        self._shares: dict[WorkerState, Shares] = {}
        self._mine: dict[WorkerState, NDArray[np.bool_]] = {}
        self._news: list[News] = []
        self._put_prompts(holders)

    # Rows are born

    def _put_prompts(self, holders: Sequence[int]) -> None:
        """Store the prompts' token ids. Nothing is communicated.

        Groups are dealt over nodes in equal parts. With locality, each rank keeps the prompts, which it has anyway,
        and they never travel; else each home does.
        """
        prompts = prompt_columns(self.prompts)
        rows = np.arange(self.num_rows)
        groups = rows // self.group_size
        homes = self._dealer.deal_homes(prompts.lengths("prompt_ids").numpy(), holders)[groups]
        columns = columns_mask(prompts.names)
        lengths = {name: prompts.lengths(name).numpy()[groups] for name in announced_lengths(columns)}
        self._lives.observe([RowMetadata(rows, homes, columns, lengths)])
        if self._dock.rules.locality:
            self._payload.keep_prompts(prompts, groups)
        else:
            self._payload.store_own_prompts(prompts, groups, homes)

    def prompt_of(self, row: int) -> Prompt:
        """The prompt that a row answers."""
        return self.prompts[row // self.group_size]

    def deal_generation(self) -> list[int]:
        """The rows, in whole groups, that this rank generates: takers on a group's home node share its groups evenly.

        Where ranks generate together, all of them get the rows of the first, which alone puts what they make.
        """
        state = WorkerState.GENERATION
        rows = self._lives.controller(state).ready_rows(by_group=True)
        shares = self._dealer.deal_generation(rows, self._lives.catalogue)
        own, groups = self._claim(state, shares), self._dock.rules.row_groups.get(state)
        return (own if groups is None else shares.get(groups.leader, own)).tolist()

    # States take and put

    def take(self, state: WorkerState, names: Iterable[str]) -> Batch:
        """Claim all rows that are ready for `state`, and return this rank's share of them with the named columns.

        Where ranks work on the same rows, the first of them takes and the others get what it took. The batch may be a
        view of stored rows: it must not be changed, and it is valid until the batch of this step is closed.
        Collective where rows cross nodes.
        """
        names = self._checked(state, names)
        shares = self._dealer.deal(state, self._lives.controller(state).ready_rows(), self._lives.catalogue)
        own = self._claim(state, shares)
        groups = self._dock.rules.row_groups.get(state)
        if groups is None:
            return self._payload.exchange(own, shares, names)
        rows = shares.get(groups.leader, own)
        if self._payload.all_read_in_place(groups.members.ranks, rows):
            return self._payload.exchange(rows, shares, names)
        batch = self._payload.exchange(own, shares, names)
        return groups.share(batch if groups.is_leader else None)

    def take_generated(self, state: WorkerState) -> list[int]:
        """Claim all rows that are ready for `state`, each rank those that it put as generated, and move nothing."""
        generated = self._shares.get(WorkerState.GENERATION)
        assert generated is not None, f"{state.value} takes what ranks generated, but nothing was dealt for generation"
        ready = self._lives.controller(state).ready_rows()
        return self._claim(state, {rank: rows[np.isin(rows, ready)] for rank, rows in generated.items()}).tolist()

    def read(self, rows: Sequence[int], names: Iterable[str]) -> Batch:
        """Look at columns of some rows without claiming them: for a report, say. Only this rank takes part."""
        return self._payload.get(np.asarray(rows, dtype=np.int64), sorted(names))

    def put(self, state: WorkerState, batch: Batch) -> None:
        """Store columns that `state` made of rows that this rank took, each in the row's home.

        Where ranks work on the same rows, the rank that took them stores for all. Tensors of the batch may be taken
        over: they must not change any more.
        """
        check_columns(batch, state)
        groups = self._dock.rules.row_groups.get(state)
        if groups is not None and not groups.is_leader:
            return
        host = batch.on_host()
        rows = host.rows.numpy()
        mine = self._mine.get(state)
        strangers = rows if mine is None else rows[~mine[rows]]
        if strangers.size:
            rank = self._dock.world.rank
            raise ValueError(f"rank {rank} puts {state.value} columns of row {strangers[0]}, which it didn't take")
        self._check_lengths(host)
        columns = columns_mask(host.names)
        lengths = {name: host.lengths(name).numpy() for name in announced_lengths(columns)}
        entry = RowMetadata(rows, self._homes[rows], columns, lengths)
        self._payload.put(host)
        self._news.append(entry)

    def mark_deferred(self, rows: Sequence[int]) -> None:
        """Take rows out of the batch from the next `commit` on, as they go on in a later step's."""
        self.mark_dropped(rows, DEFERRED)

    def mark_dropped(self, rows: Sequence[int], reason: str) -> None:
        """Take rows out of the batch from the next `commit` on; of several reasons the first in the alphabet counts."""
        if len(rows):
            self._news.append(RowDrop(np.asarray(rows, dtype=np.int64), reason))

    def commit(self, state: WorkerState) -> None:
        """Publish what was put and dropped, and end the claims of `state`. Collective over all ranks."""
        packed = torch.from_numpy(pack_news(joined(self._news)))
        self._news.clear()
        gathered = gather_ragged(packed)
        self._payload.settle()
        received = sum(part.numel() for part in gathered) - packed.numel()
        self._dock.transport.volume.metadata_bytes += received * packed.element_size()
        self._lives.finish(state)
        self._lives.observe(entry for part in gathered for entry in unpack_news(part.numpy(), self.num_rows))

    # Rows are kept over a restart

    def write_to(self, folder: Path) -> list[Path]:
        """Write all that this batch holds, between two states; returns this rank's files. Every rank calls it."""
        world, paths = self._dock.world, []
        if world.is_main:
            paths.append(write_lives(folder, self._lives.snapshot()))
        if world.local_rank == 0:
            paths.append(write_columns(folder, world.node, self._payload.columns_here()))
        return paths

    def read_from(self, folder: Path) -> None:
        """Take back what `write_to` wrote, on any number of nodes. Collective.

        Raises ValueError for a folder of another step, or with another number of rows or states. Damaged files raise
        whatever they make fail, after which the batch can't be used.
        """
        try:
            self._read_from(folder)
        finally:
            # The node's other ranks read what its first rank has stored now.
            barrier()

    def _read_from(self, folder: Path) -> None:
        saved = read_lives(folder)
        expected = [self.step, self.num_rows, self.group_size]
        if saved["batch"].tolist() != expected:
            raise ValueError(
                f"{folder} holds step, rows and responses a prompt {saved['batch'].tolist()}, but they are {expected}"
            )
        world, homes = self._dock.world, self._homes
        self._lives = restored(self._dock.needs_by_state, saved, homes)
        self._payload.catalogue = self._lives.catalogue
        # The ranks that generated them are unknown: rows still to be rewarded are dealt anew.
        self._shares.setdefault(WorkerState.GENERATION, {})
        if world.local_rank == 0:
            prompts, missing = self._payload.everywhere, _columns_of_node(saved, homes == world.node)
            for batch in read_columns(folder, np.flatnonzero(homes == world.node)):
                (name,) = batch.names
                if name not in prompts:
                    self._payload.put(batch)
                found = batch.rows.numpy()
                missing[name] = np.setdiff1d(missing.get(name, found), found)
            for name, rows in missing.items():
                if rows.size and name not in prompts:
                    raise ValueError(f"{folder} lacks {name} of row {rows[0]}; a node's file is missing or another")

    # What is known

    def lengths(self, name: str) -> Tensor:
        """Row lengths [num_rows] of a ragged column, from metadata; 0 where it isn't there."""
        return torch.from_numpy(self._lives.catalogue.lengths(name).clip(min=0))

    @property
    def rows_of_step(self) -> Integers:
        """The rows that this step is to train on, ascending: all but the deferred ones."""
        rows = np.arange(self.num_rows)
        return rows[~np.isin(rows, self._lives.deferred_rows())]

    def generation_shares(self) -> Shares:
        """The rows that each rank was dealt to generate."""
        return self._shares[WorkerState.GENERATION]

    def is_trained(self, row: int) -> bool:
        """Whether the update has used this row."""
        return row in self._lives.controller(WorkerState.UPDATE).rows_with(RowStatus.CONSUMED)

    def account(self) -> Accounting:
        """Where every row ended. Raises RuntimeError if one was neither trained, dropped nor deferred."""
        return self._lives.settled()

    @property
    def _homes(self) -> Integers:
        return self._lives.catalogue.homes

    def _checked(self, state: WorkerState, names: Iterable[str]) -> list[str]:
        names = sorted(names)
        needs = self._lives.controller(state).needs
        undeclared = set(names) - needs
        if undeclared:
            raise ValueError(
                f"{state.value} takes {sorted(undeclared)}, which its controller doesn't wait for; it waits for "
                f"{sorted(needs)}: add them to what the state needs"
            )
        return names

    def _claim(self, state: WorkerState, shares: Shares) -> Integers:
        """Claim every rank's share here too, and return this rank's."""
        self._lives.claim(state, np.concatenate([*shares.values(), np.empty(0, dtype=np.int64)]))
        self._shares[state] = shares
        own = shares.get(self._dock.world.rank, np.empty(0, dtype=np.int64))
        self._mine.setdefault(state, np.zeros(self.num_rows, dtype=bool))[own] = True
        return own

    def _check_lengths(self, batch: Batch) -> None:
        """Refuse a column whose rows aren't as long as those of the column that it goes with."""
        for name in batch.names:
            if not batch.is_ragged(name) or length_column(name) == name:
                continue
            other = length_column(name)
            if other in batch and batch.offsets(name) is batch.offsets(other):
                continue
            lengths, rows = np.diff(batch.offsets(name).numpy()), batch.rows.numpy()
            known = batch.lengths(other).numpy() if other in batch else self._lives.catalogue.lengths(other)[rows]
            expected = known.clip(min=0)
            if not np.array_equal(lengths, expected):
                at = int((lengths != expected).argmax())
                raise ValueError(
                    f"column {name!r} has {lengths[at]} values in row {rows[at]}, but {other!r} has {expected[at]}; "
                    "put one value for each of its tokens"
                )


def prompt_columns(prompts: Sequence[Prompt]) -> Batch:
    """The prompts as the dock stores them, one row each."""
    ids = [np.asarray(prompt.prompt_ids, dtype=np.int32) for prompt in prompts]
    batch = Batch.of_rows(range(len(ids)))
    values = np.concatenate([np.empty(0, dtype=np.int32), *ids])
    batch.put_ragged("prompt_ids", torch.from_numpy(values), offsets_of([part.size for part in ids]))
    return batch


def _columns_of_node(saved: Arrays, is_here: NDArray[np.bool_]) -> dict[str, Integers]:
    """The rows of a node that have each column, by what was saved of them."""
    named = [(key.removeprefix("has/"), has) for key, has in saved.items() if key.startswith("has/")]
    return {name: np.flatnonzero(has & is_here) for name, has in named}
