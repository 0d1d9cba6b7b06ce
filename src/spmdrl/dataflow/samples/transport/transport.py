"""How a rank reaches rows: in its node's warehouse in place, in other nodes' by request or by exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Gt

from spmdrl.dataflow.samples.store.shared_memory import Pool, host_pool
from spmdrl.dataflow.samples.store.warehouse import Warehouse
from spmdrl.dataflow.samples.transport.exchange import Exchange, Transfer
from spmdrl.dataflow.samples.transport.remote import RemoteWarehouses
from spmdrl.dataflow.samples.volume import Link, Volume, column_bytes
from spmdrl.resources.collectives import barrier, gather_bytes
from spmdrl.resources.world import World
from spmdrl.types import Batch, Integers


@dataclass(frozen=True)
class DockConfig:
    """How the transfer dock places rows, and how it waits."""

    timeout_seconds: Annotated[float, Gt(0)] = 120.0
    """longest that one request to a warehouse may take before the job ends with an error"""
    locality: bool = True
    """whether rows stay on the node that generates them and are assigned within it first; false: the paper's
    placement"""
    network: Literal["auto", "tcp"] = "auto"
    """how nodes exchange requests on a trusted network; auto: by whatever TensorPipe finds best; tcp: by plain TCP"""


class Transport:
    """This rank's ways to the warehouses of all nodes; warehouse n is that of node n.

    Several ranks of a node share its warehouse by shared memory; several nodes communicate by RPC and point to
    point; a job of one rank needs neither. Opening and `close` are collective over all ranks.
    """

    def __init__(self, world: World, config: DockConfig):
        self.volume = Volume()
        self._node = world.node
        self.warehouse = Warehouse(open_pool(world))
        self._exchange = Exchange(world.rank, config.timeout_seconds)
        self._remote = (
            RemoteWarehouses(
                self.warehouse, world, config.timeout_seconds, plain_tcp=config.network == "tcp"
            )
            if world.num_nodes > 1
            else None
        )  # fmt: skip

    def put(self, home: int, batch: Batch) -> None:
        """Store rows in their home; tensors may be taken over, and then must not change."""
        if home == self._node:
            self.warehouse.put(batch)
        else:
            self._others(home).put(home, batch)
        link = Link.PROCESS if home == self._node else Link.CROSS_NODE
        self.volume.count_put(link, column_bytes(batch))

    def get(self, home: int, rows: Integers, names: Sequence[str]) -> Batch:
        """Columns of rows that live in one warehouse, by a request where it is another node's."""
        if home == self._node:
            return self.warehouse.get(rows, names, self.volume)
        batch = self._others(home).get(home, torch.from_numpy(rows), names)
        self._count_crossing(batch)
        return batch

    def exchange(
        self, moves: Sequence[Transfer], names: Sequence[str], num_values: Callable[[Integers], Mapping[str, int]]
    ) -> list[Batch]:
        """What came for this rank in an exchange of rows between nodes. Collective over the ranks of `moves`."""
        came = self._exchange.run(moves, lambda rows: self.warehouse.get(rows, names), num_values)
        for batch in came:
            self._count_crossing(batch)
        return came

    def _count_crossing(self, batch: Batch) -> None:
        self.volume.count_get(Link.CROSS_NODE, column_bytes(batch))

    def _others(self, home: int) -> RemoteWarehouses:
        assert self._remote is not None, f"a job on one node has warehouse {self._node} only, not {home}"
        return self._remote

    def close(self) -> None:
        """Leave in order."""
        self._leave(graceful=True)

    def abandon(self) -> None:
        """Leave after a failure, without waiting for other ranks."""
        self._leave(graceful=False)

    def _leave(self, *, graceful: bool) -> None:
        if self._remote is not None:
            self._remote.leave(graceful=graceful)
        self.warehouse.close()


def open_pool(world: World) -> Pool | None:
    """The memory that the ranks of this node share, made by the first of them; None for a rank that is alone there.

    Collective over all ranks.
    """
    launch = world.launch
    if launch.local_world_size == 1:
        return None
    host = host_pool(launch.local_world_size) if launch.local_rank == 0 else None
    addresses = gather_bytes(host.address if host else b"")
    pool = Pool(addresses[launch.first_rank_of(launch.node_rank)], launch.local_rank)
    # Until all ranks have opened the memory, its maker must keep it open.
    barrier()
    if host is not None:
        host.forget_names()
    return pool
