"""Payload of a job on several nodes: rows lie in the warehouses of their homes, and cross nodes to their takers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from spmdrl.dataflow.samples.catalogue import Catalogue
from spmdrl.dataflow.samples.schema import PROMPT_COLUMNS, empty_batch, rule_of
from spmdrl.dataflow.samples.store.shared_memory import Place
from spmdrl.dataflow.samples.store.warehouse import Warehouse
from spmdrl.dataflow.samples.transport.exchange import Exchange, transfers
from spmdrl.dataflow.samples.transport.remote import RemoteWarehouses
from spmdrl.dataflow.samples.volume import Link, Volume, column_bytes
from spmdrl.nouns.batch import Batch, Integers
from spmdrl.resources.world import World


class SeveralNodes:
    """Columns of rows in all nodes' warehouses; homes and lengths come from the catalogue. Warehouse n is node n's.

    With locality, every rank has the prompts of all rows, which then never travel.
    """

    def __init__(
        self, own: Warehouse, volume: Volume, world: World, timeout_seconds: float, *, locality: bool, plain_tcp: bool
    ):
        self._own = own
        self._volume = volume
        self._world = world
        self._everywhere = PROMPT_COLUMNS if locality else frozenset[str]()
        self._exchange = Exchange(world.rank, timeout_seconds)
        self._remote = RemoteWarehouses(own, world, timeout_seconds, plain_tcp=plain_tcp)

    def put(self, batch: Batch, catalogue: Catalogue) -> list[tuple[Batch, Place | None]]:
        """Store columns in their rows' homes, by a request if these are other nodes.

        Returns each home's rows and their place in its memory. Tensors of the batch may be taken over.
        """
        homes, parts = catalogue.homes[batch.rows.numpy()], []
        for home in np.unique(homes).tolist():
            here = np.flatnonzero(homes == home)
            part = batch if here.size == homes.size else batch.select(torch.from_numpy(here))
            is_own = home == self._world.node
            parts.append((part, self._own.put(part) if is_own else self._remote.put(home, part)))
            self._volume.count_put(Link.PROCESS if is_own else Link.CROSS_NODE, column_bytes(part))
        return parts

    def get(self, rows: Integers, names: list[str], catalogue: Catalogue) -> Batch:
        """Return the columns of any rows in row order, by requests to other nodes for rows that live there."""
        homes, parts = catalogue.homes[rows], []
        for home in np.unique(homes).tolist():
            here = rows[homes == home]
            if home == self._world.node:
                parts.append(self._own.get(here, names, self._volume))
            else:
                came = self._remote.get(home, torch.from_numpy(here), self._travelling(names))
                parts.append(self._received(came, names))
        return _joined(parts, names)

    def exchange(self, own: Integers, shares: Mapping[int, Integers], names: list[str], catalogue: Catalogue) -> Batch:
        """Return this rank's rows, while ranks exchange rows that cross nodes. Collective over all ranks."""
        travelling = self._travelling(names)
        came = self._exchange.run(
            transfers(shares, catalogue.homes, self._world.launch),
            lambda rows: self._own.get(rows, travelling),
            lambda rows: {name: _num_values(catalogue, rows, name) for name in travelling},
        )
        parts = [self._received(batch, names) for batch in came]
        here = own[catalogue.homes[own] == self._world.node]
        if here.size:
            parts.insert(0, self._own.get(here, names, self._volume))
        return _joined(parts, names)

    def leave(self, *, graceful: bool) -> None:
        """Leave in order, collectively over all ranks, or after a failure, without waiting for others."""
        self._remote.leave(graceful=graceful)
        self._own.close()

    def _travelling(self, names: list[str]) -> list[str]:
        return [name for name in names if name not in self._everywhere]

    def _received(self, batch: Batch, names: list[str]) -> Batch:
        """Add local columns to rows from another node."""
        self._volume.count_get(Link.CROSS_NODE, column_bytes(batch))
        kept = [name for name in names if name in self._everywhere]
        if kept:
            batch.update(self._own.get(batch.rows, kept))
        return batch


def _num_values(catalogue: Catalogue, rows: Integers, name: str) -> int:
    return int(catalogue.lengths(name)[rows].sum()) if rule_of(name).column.ragged else int(rows.size)


def _joined(parts: list[Batch], names: Iterable[str]) -> Batch:
    """Join rows from several places in one batch, in row order."""
    if not parts:
        return empty_batch(names)
    if len(parts) == 1:
        return parts[0]
    batch = Batch.concatenate(parts)
    return batch.select(batch.rows.argsort())
