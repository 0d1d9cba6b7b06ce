"""Payload of a job on several nodes: rows lie in the warehouses of their homes, and cross nodes to their takers.

Single reads and foreign puts are requests by TensorPipe RPC with a deadline. Only ids and frames travel; other
processes may run only the closed list at the end of this file here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed.rpc as rpc
from torch import Tensor

from spmdrl.dataflow.samples.catalogue import Catalogue
from spmdrl.dataflow.samples.schema import PROMPT_COLUMNS, RULES, column_number, empty_batch, rule_of
from spmdrl.dataflow.samples.store.frame import pack, read_frame
from spmdrl.dataflow.samples.store.shared_memory import Place
from spmdrl.dataflow.samples.store.warehouse import Warehouse
from spmdrl.dataflow.samples.transport.exchange import Exchange, failure_of, transfers
from spmdrl.dataflow.samples.transport.rpc_agent import join_rpc, leave_rpc
from spmdrl.dataflow.samples.volume import Link, Volume, column_bytes
from spmdrl.nouns.batch import Batch, Integers
from spmdrl.resources.world import World


class SeveralNodes:
    """Columns of rows in all nodes' warehouses; homes and lengths come from the catalogue. Warehouse n is node n's.

    With locality, every rank has the prompts of all rows, which then never travel.
    """

    def __init__(self, place: int, volume: Volume, world: World, remote: RemoteWarehouses, *, locality: bool):
        """`remote` has this node's warehouse at `place`, and reaches those at the same place of other nodes."""
        self._own = remote.own[place]
        self._volume = volume
        self._world = world
        self._everywhere = PROMPT_COLUMNS if locality else frozenset[str]()
        self._exchange = Exchange(world.rank, remote.timeout_seconds)
        self._remote = remote
        self._place = place

    def put(self, batch: Batch, catalogue: Catalogue) -> list[tuple[Batch, Place | None]]:
        """Store columns in their rows' homes, by a request if these are other nodes.

        Returns each home's rows and their place in its memory. Tensors of the batch may be taken over.
        """
        homes, parts = catalogue.homes[batch.rows.numpy()], []
        for home in np.unique(homes).tolist():
            here = np.flatnonzero(homes == home)
            part = batch if here.size == homes.size else batch.select(torch.from_numpy(here))
            is_own = home == self._world.node
            parts.append((part, self._own.put(part) if is_own else self._remote.put(home, self._place, part)))
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
                came = self._remote.get(home, self._place, torch.from_numpy(here), self._travelling(names))
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


class RemoteWarehouses:
    """Warehouses of other nodes, in as many places as each has. Construction and a graceful `leave` are collective over
    all ranks."""

    def __init__(self, own: Sequence[Warehouse], world: World, timeout_seconds: float, *, plain_tcp: bool = False):
        """`own` are this node's warehouses by place."""
        self.own = own
        self._world = world
        self.timeout_seconds = timeout_seconds
        self._failed = False
        # Before others can reach this rank.
        _hosted[:] = own
        join_rpc(_worker_name(world.rank), world, [remote_put, remote_get], timeout_seconds, plain_tcp=plain_tcp)
        self._joined = True

    def put(self, warehouse: int, place: int, batch: Batch) -> Place | None:
        """Store rows; returns their place in that node's memory, if its ranks share one."""
        what = f"to store {_columns_of_rows(batch.names, batch.rows)} in"
        (stored,) = self._call(warehouse, what, remote_put, pack(batch), torch.tensor(place))
        return Place(*stored.tolist()) if stored.numel() else None

    def get(self, warehouse: int, place: int, rows: Tensor, names: Sequence[str]) -> Batch:
        """Return the named columns of the rows, in this order. Raises KeyError, naming a missing row and column."""
        columns = torch.tensor([column_number(name) for name in names], dtype=torch.int64)
        what = f"for {_columns_of_rows(names, rows)} from"
        (frame,) = self._call(warehouse, what, remote_get, rows, columns, torch.tensor(place))
        return read_frame(frame)

    def leave(self, *, graceful: bool) -> None:
        """Leave RPC; after a failed request, or if not `graceful`, without waiting for others."""
        try:
            if self._joined:
                leave_rpc(self._world, graceful=graceful and not self._failed, timeout_seconds=self.timeout_seconds)
        finally:
            self._joined = False
            _hosted.clear()

    def _call(self, warehouse: int, what: str, function: Callable[..., Any], *tensors: Tensor) -> list[Tensor]:
        """Run a remote function at a warehouse. Raises TimeoutError or ConnectionError if it can't."""
        host = self._world.launch.first_rank_of(warehouse)
        started = time.perf_counter()
        try:
            answer = rpc.rpc_sync(_worker_name(host), function, tensors, timeout=self.timeout_seconds)
        except RuntimeError as error:
            self._failed = True
            waited = f"rank {self._world.rank} waited {time.perf_counter() - started:.1f} s"
            who = f"{waited} {what} warehouse {warehouse} (rank {host})"
            raise failure_of(who, error, self.timeout_seconds) from error
        refusal, text, tensors = answer
        if refusal:
            who = f"warehouse {warehouse} (rank {host}), requested by rank {self._world.rank}"
            raise _REFUSALS[refusal](f"{who}: {text}")
        return list(tensors)


# Remote functions: the closed list that other processes may run here. They get only ids and frames, and return (kind of
# refusal, text, tensors), so that no exception object travels.

_hosted: list[Warehouse] = []
"""This node's warehouses by place."""
_REFUSALS: dict[str, type[Exception]] = {"KeyError": KeyError, "ValueError": ValueError}


def remote_put(frame: Tensor, place: Tensor) -> tuple[str, str, list[Tensor]]:
    """Store the batch of this frame in the warehouse at this place; returns where it is in the node's memory."""

    def put(warehouse: Warehouse) -> list[Tensor]:
        return [torch.tensor(warehouse.put(read_frame(frame)) or (), dtype=torch.int64)]

    return _answered(put, place)


def remote_get(rows: Tensor, columns: Tensor, place: Tensor) -> tuple[str, str, list[Tensor]]:
    """Return the columns with these schema numbers of these rows of the warehouse at this place, as a frame."""

    def get(warehouse: Warehouse) -> list[Tensor]:
        numbers = columns.tolist()
        if any(not 0 <= number < len(RULES) for number in numbers):
            raise ValueError(f"column numbers {numbers} are requested, but the schema has {len(RULES)} columns")
        return [pack(warehouse.get(rows, [RULES[number].name for number in numbers]))]

    return _answered(get, place)


def _answered(work: Callable[[Warehouse], list[Tensor]], place: Tensor) -> tuple[str, str, list[Tensor]]:
    number = int(place)
    if not 0 <= number < len(_hosted):
        return "ValueError", f"{len(_hosted)} warehouses live in this process, none of them at place {number}", []
    try:
        return "", "", work(_hosted[number])
    except (KeyError, ValueError) as error:
        return "KeyError" if isinstance(error, KeyError) else "ValueError", str(error.args[0]), []


def _worker_name(rank: int) -> str:
    return f"dock{rank}"


def _columns_of_rows(names: Sequence[str], rows: Tensor) -> str:
    span = f"rows {int(rows.min())}..{int(rows.max())} ({rows.numel()} of them)" if rows.numel() else "no rows"
    return f"columns {', '.join(names)} of {span}"
