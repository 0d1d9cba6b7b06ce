"""The payload of one step's rows: where it is put, and how it reaches the ranks that took the rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch

from spmdrl.dataflow.samples.control.catalogue import Catalogue
from spmdrl.dataflow.samples.schema import columns_mask, empty_batch, names_of_mask, rule_of
from spmdrl.dataflow.samples.transport.exchange import transfers
from spmdrl.dataflow.samples.transport.transport import Transport
from spmdrl.resources.collectives import barrier
from spmdrl.resources.world import World
from spmdrl.types import Batch, Integers


class Payload:
    """Puts and gets columns by rows; homes and lengths come from the catalogue."""

    def __init__(self, transport: Transport, world: World, catalogue: Catalogue):
        self.catalogue = catalogue
        self._transport = transport
        self._world = world
        self.everywhere: frozenset[str] = frozenset()
        """columns that every rank has, so that they never travel"""
        self._prompts_are_stored = True

    def keep_prompts(self, prompts: Batch, groups: Integers) -> None:
        """Keep the prompts of all rows on this rank; `groups` is the prompt of each row. Every rank does so."""
        self.everywhere = frozenset(prompts.names)
        self._transport.warehouse.keep(prompts, np.arange(groups.size), groups)

    def store_own_prompts(self, prompts: Batch, groups: Integers, homes: Integers) -> None:
        """Store the prompts of the rows that live on this node, each prompt once; one rank of the node does so."""
        self._prompts_are_stored = False
        own_rows = np.flatnonzero(homes == self._world.node)
        if self._world.local_rank == 0 and own_rows.size:
            own_groups, positions = np.unique(groups[own_rows], return_inverse=True)
            kept = prompts.select(torch.from_numpy(own_groups))
            self._transport.warehouse.put(kept, rows=own_rows, positions=positions)

    def put(self, batch: Batch) -> None:
        """Store columns in the homes of their rows; the tensors may be taken over."""
        homes = self.catalogue.homes[batch.rows.numpy()]
        for home in sorted(set(homes.tolist())):
            here = np.flatnonzero(homes == home)
            part = batch if here.size == homes.size else batch.select(torch.from_numpy(here))
            self._transport.put(home, part)

    def get(self, rows: Integers, names: list[str]) -> Batch:
        """The columns of any rows, by requests to other nodes where they live there, in row order."""
        self._wait_for_prompts()
        parts, travelling, homes = [], self._travelling(names), self.catalogue.homes[rows]
        for home in np.unique(homes).tolist():
            here = rows[homes == home]
            if home == self._world.node:
                parts.append(self._transport.get(home, here, names))
            else:
                parts.append(self._with_prompts(self._transport.get(home, here, travelling), names))
        return _joined(parts, names)

    def exchange(self, own: Integers, shares: Mapping[int, Integers], names: list[str]) -> Batch:
        """This rank's rows, while ranks send each other what crosses nodes. Collective over all ranks."""
        self._wait_for_prompts()
        homes, travelling = self.catalogue.homes, self._travelling(names)
        moves = transfers(shares, homes, self._world.launch)
        came = self._transport.exchange(moves, travelling, lambda rows: self._num_values(rows, travelling))
        parts = [self._with_prompts(batch, names) for batch in came]
        here = own[homes[own] == self._world.node]
        if here.size:
            parts.insert(0, self._transport.get(self._world.node, here, names))
        return _joined(parts, names)

    def all_read_in_place(self, ranks: Iterable[int], rows: Integers) -> bool:
        """Whether all of these ranks run on the node where all of these rows live."""
        nodes = {self._world.launch.node_of(rank) for rank in ranks}
        return len(nodes) == 1 and bool((self.catalogue.homes[rows] == nodes.pop()).all())

    def columns_here(self) -> Iterator[Batch]:
        """What this node's warehouse holds, one column at a time; columns that every rank has are left out."""
        here = np.flatnonzero(self.catalogue.homes == self._world.node)
        held = names_of_mask(int(np.bitwise_or.reduce(self.catalogue.columns[here], initial=0)))
        for name in self._travelling(held):
            has_it = (self.catalogue.columns[here] & columns_mask([name])) != 0
            yield self._transport.warehouse.get(here[has_it], [name])

    def settle(self) -> None:
        """All ranks have met, so what was stored before is there for all."""
        self._prompts_are_stored = True

    def _wait_for_prompts(self) -> None:
        if not self._prompts_are_stored:
            # Until ranks have met, another rank's warehouse may still be without this step's prompts.
            barrier()
            self._prompts_are_stored = True

    def _travelling(self, names: list[str]) -> list[str]:
        return [name for name in names if name not in self.everywhere]

    def _with_prompts(self, batch: Batch, names: list[str]) -> Batch:
        """Add the columns that needn't travel to rows that came from elsewhere."""
        kept = [name for name in names if name in self.everywhere]
        if kept:
            batch.update(self._transport.warehouse.get(batch.rows.numpy(), kept))
        return batch

    def _num_values(self, rows: Integers, names: list[str]) -> dict[str, int]:
        """How many values the columns have in these rows."""
        counts = {}
        for name in names:
            ragged = rule_of(name).column.ragged
            counts[name] = int(self.catalogue.lengths(name)[rows].sum()) if ragged else int(rows.size)
        return counts


def _joined(parts: list[Batch], names: Iterable[str]) -> Batch:
    """Rows from several places as one batch, in row order."""
    if not parts:
        return empty_batch(names)
    if len(parts) == 1:
        return parts[0]
    batch = Batch.concatenate(parts)
    return batch.select(batch.rows.argsort())
