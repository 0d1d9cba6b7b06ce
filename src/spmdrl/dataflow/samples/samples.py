"""The samples of one step: payload in warehouses, shares decided by controllers that every rank replicates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from spmdrl.dataflow.data.prompts import Prompt, prompt_columns
from spmdrl.dataflow.samples.balancing.dealing import Dealer, DealRules, GroupLengths, Shares
from spmdrl.dataflow.samples.balancing.length_history import LengthHistory
from spmdrl.dataflow.samples.catalogue import Catalogue, News, RowDrop, RowMetadata, metadata_of
from spmdrl.dataflow.samples.row_lives import DEFERRED, Accounting, RowLives, RowStatus
from spmdrl.dataflow.samples.row_news import Exchanged, exchanged
from spmdrl.dataflow.samples.schema import PROMPT_COLUMNS, check_columns, check_row_lengths, columns_mask, names_of_mask
from spmdrl.dataflow.samples.store.keeping import (
    read_columns,
    read_lives,
    restored,
    saved_columns,
    snapshot,
    write_columns,
    write_lives,
)
from spmdrl.dataflow.samples.store.shared_memory import Place
from spmdrl.dataflow.samples.store.warehouse import Warehouse
from spmdrl.dataflow.samples.volume import Volume
from spmdrl.nouns.batch import Batch, Integers, WorkerState
from spmdrl.observability.fault_points import faultpoint
from spmdrl.resources.device import to_host
from spmdrl.resources.world import World
from spmdrl.runtime.supervision.stop_request import StopAgreed, stop_reason


class Payload(Protocol):
    """Where columns are put, and how they reach the ranks that took their rows."""

    def put(self, batch: Batch, catalogue: Catalogue) -> list[tuple[Batch, Place | None]]:
        """Store columns in the homes of their rows; the rows of each home, and their place in shared memory."""

    def get(self, rows: Integers, names: list[str], catalogue: Catalogue) -> Batch:
        """Columns of any rows. Only this rank takes part."""

    def exchange(self, own: Integers, shares: Shares, names: list[str], catalogue: Catalogue) -> Batch:
        """This rank's rows `own`, while the other ranks get theirs by `shares`. Collective where rows cross nodes."""

    def leave(self, *, graceful: bool) -> None: ...


@dataclass(frozen=True)
class DockParts:
    """What the samples of every step use."""

    world: World
    needs_by_state: Mapping[WorkerState, frozenset[str]]
    rules: DealRules
    warehouse: Warehouse
    payload: Payload
    volume: Volume
    history: LengthHistory


class Samples:
    """The rows of one step. Row r is response r % group_size of prompt r // group_size.

    Its methods decide the same on every rank, so every rank calls them in the same order; only `put`, `mark_dropped`
    and `read` are local to a rank. What they change reaches the other ranks with the next `commit`:

        put -> payload, and its metadata -> news --commit--> lives of all ranks -> ready rows -> shares -> take
    """

    def __init__(
        self, dock: DockParts, step: int, prompts: Sequence[Prompt], group_size: int, holders: Sequence[int]
    ):  # fmt: skip
        self.step = step
        self.prompts = prompts
        self.group_size = group_size
        self.num_rows = len(prompts) * group_size
        self._admitted = range(len(prompts))
        """the groups that generation may have"""
        self._dock = dock
        self._dealer = Dealer(dock.rules, step, group_size)
        columns = prompt_columns(prompts)
        self._expected_G = dock.history.expected(prompts)
        homes = self._deal_groups(self._admitted, holders).repeat(group_size)
        self._lives = RowLives(dock.needs_by_state, homes, step=step, group_size=group_size)
        self._shares: dict[WorkerState, Shares] = {}
        """by state, the rows that each rank claimed last"""
        self._own: dict[WorkerState, NDArray[np.bool_]] = {}
        """by state, whether this rank claimed each row last [num_rows + 1]; made when it is wanted"""
        self._news: list[News] = []
        """what this rank put and dropped since the last commit"""
        self._portions: list[Integers] = []
        """rows of all ranks that were announced together"""
        self._keep_prompts(columns)

    def _keep_prompts(self, prompts: Batch) -> None:
        """Keep the prompts' token ids, which every rank has anyway. Nothing is communicated.

        With locality each rank keeps those of all rows, so that they never travel; else those of its node's rows.
        """
        rows = np.arange(self.num_rows)
        groups = rows // self.group_size
        lengths = {"prompt_ids": prompts.lengths("prompt_ids").numpy()[groups]}
        self._lives.observe([RowMetadata(rows, columns_mask(PROMPT_COLUMNS), lengths)])
        kept = rows if self._dock.rules.locality else self._rows_here()
        self._dock.warehouse.keep(prompts, kept, groups[kept])

    def _deal_groups(self, groups: range, holders: Sequence[int] = ()) -> Integers:
        """Deal these groups for generation; returns their home nodes."""
        numbers = slice(groups.start, groups.stop)
        prompts = [len(prompt.prompt_ids) for prompt in self.prompts[numbers]]
        responses = None if self._expected_G is None else self._expected_G[numbers]
        return self._dealer.deal_groups(groups, GroupLengths(prompts, responses), holders)

    def prompt_of(self, row: int) -> Prompt:
        """The prompt that a row answers."""
        return self.prompts[row // self.group_size]

    def expected_length(self, row: int) -> int:
        """Tokens that the row's response is expected to have; 0 for all rows while no prompt has been seen before."""
        return 0 if self._expected_G is None else self._expected_G[row // self.group_size]

    def admit(self, groups: range) -> None:
        """Let generation have these groups and no others, shared out over all takers. Nothing is communicated."""
        self._admitted = groups
        homes = self._deal_groups(groups)
        if self._dock.rules.locality:
            rows = slice(groups.start * self.group_size, groups.stop * self.group_size)
            self._lives.catalogue.homes[rows] = homes.repeat(self.group_size)

    def deal_generation(self) -> list[int]:
        """The rows, in whole groups, that this rank generates; all takers are expected to have equally much to do.

        Where ranks generate together, all of them get the rows of the first, which alone puts what they make.
        """
        state = WorkerState.GENERATION
        rows = self._lives.controllers[state].ready_rows(by_group=True)
        rows = rows[np.isin(rows // self.group_size, self._admitted)]
        shares = self._dealer.deal_generation(rows)
        own, groups = self._claim(state, shares), self._dock.rules.row_groups.get(state)
        return (own if groups is None else shares.get(groups.leader, own)).tolist()

    # States take and put

    def reads(self, state: WorkerState) -> frozenset[str]:
        """The columns that rows must have before `state` gets them."""
        return self._lives.controllers[state].needs

    def ready_portions(self, state: WorkerState) -> list[Integers]:
        """The rows that are ready for `state`: those announced together, in that order, then all others."""
        ready = self._lives.controllers[state].ready_rows()
        others = ready[~np.isin(ready, np.concatenate([*self._portions, ready[:0]]))]
        portions = [*(rows[np.isin(rows, ready)] for rows in self._portions), others]
        return [rows for rows in portions if rows.size]

    def take(self, state: WorkerState, names: Iterable[str] | None = None, *, among: Integers | None = None) -> Batch:
        """Claim all rows that are ready for `state`, and return this rank's share of them with all that it reads.

        With `names` only those columns come along, and of ready rows only those `among` these. Where ranks work on the
        same rows, the first of them takes and the others get what it took. The batch may be a view of stored rows: it
        must not be changed, and it is valid until the batch of this step is closed. Collective where rows cross nodes.
        """
        faultpoint("dock.get")
        names = sorted(self.reads(state)) if names is None else self._checked(state, names)
        ready = self._lives.controllers[state].ready_rows()
        rows = ready if among is None else ready[np.isin(ready, among)]
        shares = self._dealer.deal(state, rows, self._lives.catalogue)
        own = self._claim(state, shares)
        groups = self._dock.rules.row_groups.get(state)
        if groups is None:
            return self._exchange(own, shares, names)
        rows = shares.get(groups.leader, own)
        nodes = {self._dock.world.launch.node_of(rank) for rank in groups.members.ranks}
        if nodes.issuperset(self._lives.catalogue.homes[rows].tolist()) and len(nodes) == 1:
            # All ranks of the group read the rows in place.
            return self._exchange(rows, shares, names)
        batch = self._exchange(own, shares, names)
        return groups.share(batch if groups.is_leader else None)

    def _exchange(self, rows: Integers, shares: Shares, names: list[str]) -> Batch:
        return self._dock.payload.exchange(rows, shares, names, self._lives.catalogue)

    def take_generated(self, state: WorkerState) -> list[int]:
        """Claim all rows that are ready for `state`, each rank those that it put as generated, and move nothing."""
        generated = self._shares.get(WorkerState.GENERATION)
        assert generated is not None, f"{state.value} takes what ranks generated, but nothing was dealt for generation"
        ready = self._lives.controllers[state].ready_rows()
        return self._claim(state, {rank: rows[np.isin(rows, ready)] for rank, rows in generated.items()}).tolist()

    def claim_alike(self, state: WorkerState, other: WorkerState) -> None:
        """Claim for `state` the rows that each rank claimed last for `other`, and move nothing.

        Raises ValueError if one isn't ready.
        """
        self._claim(state, self._shares[other])

    def read(self, rows: Sequence[int], names: Iterable[str]) -> Batch:
        """Read columns of some rows without claiming them, as for a report. Only this rank takes part."""
        return self._dock.payload.get(np.asarray(rows, dtype=np.int64), sorted(names), self._lives.catalogue)

    def read_dropped(self, names: Iterable[str]) -> Batch:
        """Read columns of the rows that were dropped so far, each on the first rank of its node."""
        rows = self._lives.dropped_rows()
        is_here = (self._lives.catalogue.homes[rows] == self._dock.world.node) & (self._dock.world.local_rank == 0)
        return self._dock.warehouse.get(rows[is_here], sorted(names))

    def put(self, state: WorkerState, batch: Batch) -> None:
        """Store columns that `state` made of rows that this rank took, each in the row's home.

        Values may lie on a device: they are copied to the host here, all with one wait, before anything reads them.
        Where ranks work on the same rows, the rank that took them stores for all. Tensors of the batch may be taken
        over: they must not change any more.
        """
        faultpoint("dock.put")
        check_columns(batch, state)
        groups = self._dock.rules.row_groups.get(state)
        if groups is not None and not groups.is_leader:
            return
        host, rank = batch.on_host(to_host), self._dock.world.rank
        rows = host.rows.numpy()
        foreign = self._foreign(state, rows)
        if foreign.size:
            raise ValueError(f"rank {rank} puts {state.value} columns of row {foreign[0]}, which it didn't take")
        check_row_lengths(host, self._lives.catalogue.num_values)
        self._news += self._stored(host)

    def _foreign(self, state: WorkerState, rows: Integers) -> Integers:
        """Those of some rows that this rank didn't take for `state`."""
        own = self._own.get(state)
        if own is None:
            own = self._own[state] = np.zeros(self.num_rows + 1, dtype=np.bool_)
            own[self._shares.get(state, {}).get(self._dock.world.rank, np.empty(0, dtype=np.int64))] = True
        # The last entry, which is no row's, stands for rows that aren't in the batch.
        is_own = own.take(rows, mode="clip")
        if not rows.size or (np.count_nonzero(is_own) == rows.size and rows.min() >= 0):
            return rows[:0]
        return rows[~is_own | (rows < 0)]

    def _stored(self, batch: Batch) -> list[RowMetadata]:
        parts = self._dock.payload.put(batch, self._lives.catalogue)
        return [metadata_of(part, place) for part, place in parts]

    def mark_deferred(self, rows: Sequence[int]) -> None:
        """Take rows out of the batch from the next `commit` on; they go on in the batch of a later step."""
        self.mark_dropped(rows, DEFERRED)

    def mark_dropped(self, rows: Sequence[int], reason: str) -> None:
        """Take rows out of the batch from the next `commit` on; of several reasons the first in the alphabet counts."""
        if len(rows):
            self._news.append(RowDrop(np.asarray(rows, dtype=np.int64), reason))

    def announce_portion(self) -> None:
        """Publish what ranks put and dropped, while the state that did goes on. Collective over all ranks.

        States that score rows take those that were put, a portion, by themselves. Raises StopAgreed as `commit` does.
        """
        news = self._publish(may_stop=True)
        put = [entry.rows for entry in news if isinstance(entry, RowMetadata)]
        self._portions.append(np.unique(np.concatenate([np.empty(0, dtype=np.int64), *put])))

    def commit(self, state: WorkerState) -> None:
        """Publish what was put and dropped, and end the claims of `state`. Collective over all ranks.

        Raises StopAgreed on all ranks where one of them was asked to stop, unless `state` trains: then the step is
        finished first.
        """
        self._lives.finish(state)
        self._publish(may_stop=state.work != "train")

    def _publish(self, *, may_stop: bool) -> list[News]:
        found, self._news = self._all_news(self._news), []
        self._lives.observe(found.news)
        self._index(found.news)
        if may_stop and found.stop_reason is not None:
            raise StopAgreed(found.stop_reason)
        return found.news

    def _all_news(self, own: list[News]) -> Exchanged:
        """All ranks' news. Collective over all ranks."""
        if self._dock.world.size == 1:
            return Exchanged(own, 0, stop_reason())
        found = exchanged(own)
        self._dock.volume.metadata_bytes += found.received_bytes
        return found

    def _index(self, news: Iterable[News]) -> None:
        """Read what others of this node stored from here on; the catalogue has its lengths."""
        catalogue = self._lives.catalogue
        is_here = catalogue.homes == self._dock.world.node
        for entry in news:
            if isinstance(entry, RowMetadata):
                self._dock.warehouse.add_stored(entry, is_here, catalogue.lengths)

    # Keeping rows over a restart

    def write_to(self, folder: Path) -> list[Path]:
        """Write all that this batch holds, between two states; returns this rank's files. Every rank calls it."""
        world, paths = self._dock.world, []
        if world.is_main:
            paths.append(write_lives(folder, snapshot(self._lives)))
        if world.local_rank == 0:
            paths.append(write_columns(folder, world.node, self._columns_here()))
        return paths

    def _columns_here(self) -> Iterator[Batch]:
        """What this node's rows hold, one column at a time, but for the prompts, which the next job reads again."""
        here = self._rows_here()
        columns = self._lives.catalogue.columns[here]
        for name in names_of_mask(int(np.bitwise_or.reduce(columns, initial=0))):
            if name not in PROMPT_COLUMNS:
                yield self._dock.warehouse.get(here[(columns & columns_mask([name])) != 0], [name])

    def read_from(self, folder: Path) -> None:
        """Take back what `write_to` wrote, on any number of nodes. Collective.

        Raises ValueError for a folder of another step, or with another number of rows or states. Damaged files raise
        whatever they make fail, after which the batch can't be used.
        """
        stored: list[News] = []
        try:
            self._read_from(folder, stored)
        finally:
            found = self._all_news(stored)
        self._index(found.news)

    def _read_from(self, folder: Path, stored: list[News]) -> None:
        """Restore the rows' lives, and on the first rank of each node the payload, whose news it adds to `stored`."""
        saved = read_lives(folder)
        expected = [self.step, self.num_rows, self.group_size]
        if saved["batch"].tolist() != expected:
            raise ValueError(
                f"{folder} holds step, rows and responses per prompt {saved['batch'].tolist()}, but they are {expected}"
            )
        self._lives = restored(self._dock.needs_by_state, saved, self._lives.catalogue.homes)
        # The ranks that generated them are unknown: rows still to be rewarded are dealt anew.
        self._shares.setdefault(WorkerState.GENERATION, {})
        if self._dock.world.local_rank != 0:
            return
        here = self._rows_here()
        names = [name for name in saved_columns(saved) if name not in PROMPT_COLUMNS]
        missing = {name: here[saved[f"has/{name}"][here]] for name in names}
        for batch in read_columns(folder, here):
            (name,) = batch.names
            if name not in PROMPT_COLUMNS:
                stored += self._stored(batch)
                missing[name] = np.setdiff1d(missing.get(name, ()), batch.rows.numpy())
        for name, rows in missing.items():
            if rows.size:
                raise ValueError(f"{folder} lacks {name} of row {rows[0]}; a node's file is missing or another")

    # What became of the rows

    @property
    def rows_of_step(self) -> Integers:
        """The rows that this step is to train on, ascending: all but the deferred ones."""
        rows = np.arange(self.num_rows)
        return rows[~np.isin(rows, self._lives.deferred_rows())]

    @property
    def num_dropped(self) -> Mapping[str, int]:
        """How many rows were dropped so far, by the reason."""
        return self._lives.account().num_dropped

    @property
    def groups_to_train(self) -> Integers:
        """The groups that have rows left to train on, ascending."""
        return np.unique(np.flatnonzero(~self._lives.catalogue.is_dropped) // self.group_size)

    def generation_shares(self) -> Shares:
        """The rows dealt to each rank for generation."""
        return self._shares[WorkerState.GENERATION]

    def generation_imbalance(self) -> float:
        """The most response tokens of a replica over their mean; 1 where all have equally many."""
        loads = [int(self.response_lengths[rows].clip(min=0).sum()) for rows in self.generation_shares().values()]
        return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0

    @property
    def response_lengths(self) -> Integers:
        """Tokens of each row's response [num_rows], -1 where it has none."""
        return self._lives.catalogue.lengths("response_ids")

    def is_trained(self, row: int) -> bool:
        """Whether the update has used this row."""
        return row in self._lives.controllers[WorkerState.UPDATE].rows_with(RowStatus.CONSUMED)

    def account(self) -> Accounting:
        """Where every row ended. Raises RuntimeError if one was neither trained, dropped nor deferred."""
        return self._lives.settled()

    def _rows_here(self) -> Integers:
        """The rows that live on this node."""
        return np.flatnonzero(self._lives.catalogue.homes == self._dock.world.node)

    def _checked(self, state: WorkerState, names: Iterable[str]) -> list[str]:
        names, needs = sorted(names), self.reads(state)
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
        self._own.pop(state, None)
        return shares.get(self._dock.world.rank, np.empty(0, dtype=np.int64))
