"""The samples of one step: payload in warehouses, shares decided by `StepRows`, which every rank replicates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from spmdrl.dataflow.data.prompts import prompt_columns
from spmdrl.dataflow.samples.balancing.dealing import DealRules, RowGroups, Shares
from spmdrl.dataflow.samples.balancing.length_history import LengthHistory
from spmdrl.dataflow.samples.catalogue import (
    Catalogue,
    Exchanged,
    News,
    RowDrop,
    RowMetadata,
    exchanged,
    joined,
    metadata_of,
    pack_news,
    unpack_news,
)
from spmdrl.dataflow.samples.schema import check_columns, check_row_lengths
from spmdrl.dataflow.samples.step_rows import StepRows
from spmdrl.dataflow.samples.store.keeping import read_columns, read_lives, restored, write_columns, write_lives
from spmdrl.dataflow.samples.store.shared_memory import Place
from spmdrl.dataflow.samples.store.warehouse import Warehouse
from spmdrl.dataflow.samples.volume import Volume
from spmdrl.nouns.batch import Batch, Integers, WorkerState
from spmdrl.observability.fault_points import faultpoint
from spmdrl.resources.collectives import gather_bytes
from spmdrl.resources.device import to_host
from spmdrl.resources.rank_sets import RankSets
from spmdrl.resources.world import World
from spmdrl.runtime.supervision.stop_request import StopAgreed, stop_reason


class Payload(Protocol):
    """Storage of columns, and their transport to the ranks that took their rows."""

    def put(self, batch: Batch, catalogue: Catalogue) -> list[tuple[Batch, Place | None]]:
        """Store columns in their rows' homes; returns each home's rows, and their place in shared memory."""

    def get(self, rows: Integers, names: list[str], catalogue: Catalogue) -> Batch:
        """Return columns of any rows. Only this rank takes part."""

    def exchange(self, own: Integers, shares: Shares, names: list[str], catalogue: Catalogue) -> Batch:
        """Return this rank's rows `own`, while others get theirs by `shares`. Collective if rows cross nodes."""

    def leave(self, *, graceful: bool) -> None: ...


@dataclass(frozen=True)
class DockParts:
    """Parts that the samples of every step share."""

    world: World
    needs_by_state: Mapping[WorkerState, frozenset[str]]
    rules: DealRules
    warehouse: Warehouse
    payload: Payload
    volume: Volume
    history: LengthHistory
    sets: RankSets


class Samples:
    """Samples of a step, whose columns ranks take, put and commit.

    Every rank makes the same calls in the same order, except `put`, `mark_dropped` and `read`, which are local. Their
    changes reach the other ranks with the next `commit`:

        put -> payload, and its metadata -> news --commit--> rows of all ranks -> shares -> take
    """

    def __init__(self, dock: DockParts, rows: StepRows):
        """Keep the prompts' token ids, which every rank has anyway. Nothing is communicated.

        With locality each rank keeps all rows', so that they never travel; else its node's rows'.
        """
        self.rows = rows
        self.step = rows.step
        self.group_size = rows.group_size
        self._dock = dock
        self._news: list[News] = []
        """this rank's news since the last commit"""
        self._unpublished: list[News] = []
        """news that only the ranks of its set have"""
        kept = np.arange(rows.num_rows) if dock.rules.locality else rows.on_node(dock.world.node)
        dock.warehouse.keep(prompt_columns(rows.prompts), kept, kept // rows.group_size)

    def take(self, state: WorkerState, names: Iterable[str] | None = None, *, among: Integers | None = None) -> Batch:
        """Claim all rows that are ready for `state`, and return this rank's share of them with all that it reads.

        With `names` only those columns are included, and with `among` only those of the ready rows. Where ranks work on
        the same rows, the first of them takes and passes its rows to the others. The batch may be a view of stored
        rows: it must not be changed, and is valid until this step's batch is closed. Collective if rows cross nodes.
        """
        faultpoint("dock.get")
        columns = self.rows.columns(state, names)
        self.rows.deal(state, among)
        groups, own = self._dock.rules.row_groups.get(state), self.rows.share(state)
        if groups is not None and self._are_beside(groups, led := self.rows.share(state, groups.leader)):
            # All ranks of the group read the rows in place.
            groups, own = None, led
        batch = self._dock.payload.exchange(own, self.rows.shares[state], columns, self.rows.lives.catalogue)
        return batch if groups is None else groups.share(batch if groups.is_leader else None)

    def _are_beside(self, groups: RowGroups, rows: Integers) -> bool:
        """True if rows live on the one node that has all ranks of the group."""
        nodes = {self._dock.world.launch.node_of(rank) for rank in groups.members.ranks}
        return len(nodes) == 1 and nodes.issuperset(self.rows.lives.catalogue.homes[rows].tolist())

    def read(self, rows: Sequence[int], names: Iterable[str]) -> Batch:
        """Read columns of some rows without claiming them, as for a report. Only this rank takes part."""
        index = np.asarray(rows, dtype=np.int64)
        return self._dock.payload.get(index, sorted(names), self.rows.lives.catalogue)

    def read_dropped(self, names: Iterable[str]) -> Batch:
        """Read columns of the rows that were dropped so far, each on the first rank of its node."""
        rows, world = self.rows.lives.dropped_rows(), self._dock.world
        is_here = (self.rows.lives.catalogue.homes[rows] == world.node) & (world.local_rank == 0)
        return self._dock.warehouse.get(rows[is_here], sorted(names))

    def put(self, state: WorkerState, batch: Batch) -> None:
        """Store columns that `state` computed for this rank's rows, each in the row's home.

        Values on a device are copied to the host here, with one wait for all. Where ranks work on the same rows, the
        rank that took them stores for all. Tensors of the batch may be taken over: they must not change afterwards.
        """
        faultpoint("dock.put")
        check_columns(batch, state)
        groups = self._dock.rules.row_groups.get(state)
        if groups is not None and not groups.is_leader:
            return
        host = batch.on_host(to_host)
        self.rows.check_own(state, host.rows.numpy())
        check_row_lengths(host, self.rows.lives.catalogue.num_values)
        self._news += self._stored(host)

    def _stored(self, batch: Batch) -> list[RowMetadata]:
        parts = self._dock.payload.put(batch, self.rows.lives.catalogue)
        return [metadata_of(part, place) for part, place in parts]

    def mark_dropped(self, rows: Sequence[int], reason: str) -> None:
        """Drop rows from the next `commit` on; of several reasons the alphabetically first counts.

        Rows dropped as `DEFERRED` continue in a later step's batch.
        """
        if len(rows):
            self._news.append(RowDrop(np.asarray(rows, dtype=np.int64), reason))

    def announce_portion(self) -> None:
        """Publish ranks' puts and drops while the state continues. Collective over all ranks.

        Scoring states take these rows, a portion, separately. Raises StopAgreed like `commit`.
        """
        news = self._publish(may_stop=True)
        put = [entry.rows for entry in news if isinstance(entry, RowMetadata)]
        self.rows.portions.append(np.unique(np.concatenate([np.empty(0, dtype=np.int64), *put])))

    def commit(self, state: WorkerState) -> None:
        """Publish puts and drops, and end the claims of `state`. Collective over the ranks that have the state.

        Raises StopAgreed on all ranks if one of them was asked to stop, unless `state` trains: then the step is
        finished first, as it is where only a part of the ranks has the state.
        """
        self.rows.lives.finish(state)
        self._publish(may_stop=state.work != "train")

    def publish_to_other_set(self) -> None:
        """Publish to the ranks of the other set what those of this one have published. Collective over all ranks."""
        sets = self._dock.sets
        if not sets.are_apart:
            return
        parts, self._unpublished = gather_bytes(pack_news(joined(self._unpublished))), []
        own = sets.update if sets.update.is_member else sets.generation
        of_others = [unpack_news(part) for rank, part in enumerate(parts) if rank not in own.ranks]
        self._observe([entry for news in of_others for entry in news])

    def _publish(self, *, may_stop: bool) -> list[News]:
        if self._dock.sets.are_apart:
            self._unpublished += self._news
        found, self._news = self._exchanged(self._news), []
        self._observe(found.news)
        if may_stop and found.stop_reason is not None:
            raise StopAgreed(found.stop_reason)
        return found.news

    def _observe(self, news: Sequence[News]) -> None:
        self.rows.lives.observe(news)
        self._index(news)

    def _exchanged(self, own: list[News]) -> Exchanged:
        """Return all ranks' news. Collective over all ranks."""
        if self._dock.world.size == 1:
            return Exchanged(own, 0, stop_reason())
        found = exchanged(own)
        self._dock.volume.metadata_bytes += found.received_bytes
        return found

    def _index(self, news: Iterable[News]) -> None:
        """Index columns that other ranks of this node stored; the catalogue has their lengths."""
        catalogue = self.rows.lives.catalogue
        is_here = catalogue.homes == self._dock.world.node
        for entry in news:
            if isinstance(entry, RowMetadata):
                self._dock.warehouse.add_stored(entry, is_here, catalogue.lengths)

    def write_to(self, folder: Path) -> list[Path]:
        """Write the whole batch, between two states; returns this rank's files. Every rank calls it.

        Prompts aren't written, as the next job reads them again.
        """
        world, rows, paths = self._dock.world, self.rows, []
        if world.is_main:
            paths.append(write_lives(folder, rows.lives))
        if world.local_rank == 0:
            here = rows.on_node(world.node)
            paths.append(write_columns(folder, world.node, rows.lives.catalogue, here, self._dock.warehouse))
        return paths

    def read_from(self, folder: Path) -> None:
        """Restore what `write_to` wrote, on any number of nodes. Collective.

        Raises ValueError for a folder of another step, or with another number of rows or states. Damaged files raise
        other errors, after which the batch can't be used.
        """
        stored: list[News] = []
        try:
            self.rows.lives = restored(read_lives(folder), self.rows.lives)
            # The generating ranks are unknown: rows still to be rewarded are dealt anew.
            self.rows.shares.setdefault(WorkerState.GENERATION, {})
            if self._dock.world.local_rank == 0:
                for batch in read_columns(folder, self.rows.lives.catalogue, self.rows.on_node(self._dock.world.node)):
                    stored += self._stored(batch)
        finally:
            found = self._exchanged(stored)
        self._index(found.news)
