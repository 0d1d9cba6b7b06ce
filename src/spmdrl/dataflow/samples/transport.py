"""How ranks reach warehouses: directly in their own process, by TensorPipe RPC elsewhere. Home of all RPC."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed.rpc as rpc
from torch import Tensor

from spmdrl.dataflow.samples.guard import install_guard
from spmdrl.dataflow.samples.interface import listen_privately
from spmdrl.dataflow.samples.schema import RULES, column_number
from spmdrl.dataflow.samples.volume import Link, Volume
from spmdrl.dataflow.samples.warehouse import Warehouse
from spmdrl.dataflow.samples.wire import flatten, unflatten
from spmdrl.resources.world import World
from spmdrl.types import Batch


@dataclass(frozen=True)
class DockConfig:
    """How the transfer dock waits."""

    timeout_seconds: float = 120.0
    """The longest that one request to a warehouse may take before the job ends with an error."""

    def __post_init__(self) -> None:
        if self.timeout_seconds <= 0:
            raise ValueError(f"dock.timeout_seconds is {self.timeout_seconds}, but must be > 0; the default is 120")


class Transport(Protocol):
    """What the dock asks of a way to reach warehouses; warehouse n is that of node n."""

    volume: Volume
    own_warehouse: Warehouse | None
    """The warehouse that lives in this process, if one does."""

    def put(self, warehouse: int, batch: Batch) -> None: ...
    def get(self, warehouse: int, rows: Tensor, names: Sequence[str]) -> Batch: ...

    def drop(self, rows: Tensor) -> None:
        """Forget rows in this process's own warehouse."""

    def close(self) -> None:
        """Leave in order."""

    def abandon(self) -> None:
        """Leave after a failure, without waiting for anybody."""


def open_transport(world: World, config: DockConfig) -> Transport:
    """The transport that a job of this size needs. Collective over all ranks."""
    return LocalTransport() if world.size == 1 else RpcTransport(world, config)


class LocalTransport:
    """The one rank of a job reaches its own warehouse."""

    def __init__(self) -> None:
        self.volume = Volume()
        self._warehouse = Warehouse()
        self.own_warehouse: Warehouse | None = self._warehouse

    def put(self, warehouse: int, batch: Batch) -> None:
        assert warehouse == 0, f"a job of one rank has warehouse 0 only, not {warehouse}"
        self.volume.put_bytes[Link.PROCESS] += batch.num_bytes()
        self._warehouse.put(batch)

    def get(self, warehouse: int, rows: Tensor, names: Sequence[str]) -> Batch:
        assert warehouse == 0, f"a job of one rank has warehouse 0 only, not {warehouse}"
        batch = self._warehouse.get(rows, names)
        self.volume.get_bytes[Link.PROCESS] += batch.num_bytes()
        return batch

    def drop(self, rows: Tensor) -> None:
        self._warehouse.drop(rows)

    def close(self) -> None:
        pass

    def abandon(self) -> None:
        pass


class RpcTransport:
    """Warehouses in the local-rank-0 process of each node, reached by RPC with a deadline.

    Opening and `close` are collective over all ranks. A request that fails makes `close` leave without waiting.
    """

    def __init__(self, world: World, config: DockConfig):
        self.volume = Volume()
        self._launch = world.launch
        self._timeout_seconds = config.timeout_seconds
        self._failed = False
        self.own_warehouse = Warehouse() if world.local_rank == 0 else None
        global _hosted
        _hosted = self.own_warehouse
        listen_privately(world.launch)
        install_guard([remote_put, remote_get])
        options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=config.timeout_seconds, init_method="env://")
        with warnings.catch_warnings():
            # PyTorch's own start-up of RPC calls a collective in a way that PyTorch deprecates.
            warnings.filterwarnings("ignore", message="You are using a Backend")
            rpc.init_rpc(_worker_name(world.rank), rank=world.rank, world_size=world.size, rpc_backend_options=options)
        self._joined = True

    def put(self, warehouse: int, batch: Batch) -> None:
        own = self._own(warehouse)
        if own is not None:
            own.put(batch)
        else:
            what = f"to store {_columns_of_rows(batch.names, batch.rows)} in"
            self._call(warehouse, what, remote_put, flatten(batch))
        self.volume.put_bytes[self._link(warehouse)] += batch.num_bytes()

    def get(self, warehouse: int, rows: Tensor, names: Sequence[str]) -> Batch:
        """The named columns of the rows, in this order; a missing one is a KeyError that names row and column."""
        own = self._own(warehouse)
        if own is not None:
            batch = own.get(rows, names)
        else:
            columns = torch.tensor([column_number(name) for name in names], dtype=torch.int64)
            what = f"for {_columns_of_rows(names, rows)} from"
            batch = unflatten(self._call(warehouse, what, remote_get, [rows, columns]))
        self.volume.get_bytes[self._link(warehouse)] += batch.num_bytes()
        return batch

    def drop(self, rows: Tensor) -> None:
        if self.own_warehouse is not None:
            self.own_warehouse.drop(rows)

    def close(self) -> None:
        self._leave(graceful=not self._failed)

    def abandon(self) -> None:
        self._leave(graceful=False)

    def _leave(self, *, graceful: bool) -> None:
        global _hosted
        try:
            if self._joined:
                rpc.shutdown(graceful=graceful, timeout=self._timeout_seconds)
        finally:
            self._joined = False
            _hosted = None

    def _own(self, warehouse: int) -> Warehouse | None:
        return self.own_warehouse if warehouse == self._launch.node_rank else None

    def _link(self, warehouse: int) -> Link:
        if self._own(warehouse) is not None:
            return Link.PROCESS
        return Link.NODE if warehouse == self._launch.node_rank else Link.CROSS_NODE

    def _call(self, warehouse: int, what: str, function: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
        """Run one of the remote functions at a warehouse; raises TimeoutError or ConnectionError when it can't."""
        host = self._launch.first_rank_of(warehouse)
        started = time.perf_counter()
        try:
            answer = rpc.rpc_sync(_worker_name(host), function, tuple(tensors), timeout=self._timeout_seconds)
        except RuntimeError as error:
            self._failed = True
            waited = f"rank {self._launch.rank} waited {time.perf_counter() - started:.1f} s"
            who = f"{waited} {what} warehouse {warehouse} (rank {host})"
            raise _explained(who, error, self._timeout_seconds) from error
        refusal, text, tensors = answer
        if refusal:
            raise _REFUSALS[refusal](f"warehouse {warehouse} (rank {host}), asked by rank {self._launch.rank}: {text}")
        return tensors


# Remote functions: the closed list of what another process may run here. They see ids and tensors only, and answer
# (kind of refusal, text, tensors), so that no exception object travels.

_hosted: Warehouse | None = None
_REFUSALS: dict[str, type[Exception]] = {"KeyError": KeyError, "ValueError": ValueError}


def remote_put(*tensors: Tensor) -> tuple[str, str, list[Tensor]]:
    """Store the batch that came as header and tensors."""
    return _answered(lambda warehouse: warehouse.put(unflatten(tensors)))


def remote_get(rows: Tensor, columns: Tensor) -> tuple[str, str, list[Tensor]]:
    """The columns with these schema numbers of these rows, as header and tensors."""

    def get(warehouse: Warehouse) -> list[Tensor]:
        numbers = columns.tolist()
        if any(not 0 <= number < len(RULES) for number in numbers):
            raise ValueError(f"asked for column numbers {numbers}, but the schema has {len(RULES)} columns")
        return flatten(warehouse.get(rows, [RULES[number].name for number in numbers]))

    return _answered(get)


def _answered(work: Callable[[Warehouse], list[Tensor] | None]) -> tuple[str, str, list[Tensor]]:
    if _hosted is None:
        return "ValueError", "no warehouse lives in this process", []
    try:
        return "", "", work(_hosted) or []
    except (KeyError, ValueError) as error:
        return type(error).__name__, str(error.args[0]), []


def _worker_name(rank: int) -> str:
    return f"dock{rank}"


def _columns_of_rows(names: Sequence[str], rows: Tensor) -> str:
    span = f"rows {int(rows.min())}..{int(rows.max())} ({rows.numel()} of them)" if rows.numel() else "no rows"
    return f"columns {', '.join(names)} of {span}"


def _explained(who: str, error: RuntimeError, timeout_seconds: float) -> OSError:
    if "RPCErr:1:" in str(error):
        return TimeoutError(
            f"{who}, which didn't answer within dock.timeout_seconds = {timeout_seconds:g}; that rank hangs or is "
            "overloaded: look at its log, or raise the limit"
        )
    return ConnectionError(f"{who}, but the connection failed ({error}); that rank has probably died: look at its log")
