"""Requests to warehouses of other nodes, by TensorPipe RPC with a deadline: single reads and foreign puts.

Only ids and frames travel; other processes may run only the closed list at the end of this file here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import Tensor

from spmdrl.dataflow.samples.schema import RULES, column_number
from spmdrl.dataflow.samples.store.frame import pack, read_frame
from spmdrl.dataflow.samples.store.shared_memory import Place
from spmdrl.dataflow.samples.store.warehouse import Warehouse
from spmdrl.dataflow.samples.transport.rpc_agent import join_rpc, leave_rpc
from spmdrl.nouns.batch import Batch
from spmdrl.resources.world import World


class RemoteWarehouses:
    """Warehouses of other nodes. Construction and a graceful `leave` are collective over all ranks."""

    def __init__(self, own: Warehouse, world: World, timeout_seconds: float, *, plain_tcp: bool = False):
        self._world = world
        self._timeout_seconds = timeout_seconds
        self._failed = False
        global _hosted
        _hosted = own
        join_rpc(_worker_name(world.rank), world, [remote_put, remote_get], timeout_seconds, plain_tcp=plain_tcp)
        self._joined = True

    def put(self, warehouse: int, batch: Batch) -> Place | None:
        """Store rows; returns their place in that node's memory, if its ranks share one."""
        what = f"to store {_columns_of_rows(batch.names, batch.rows)} in"
        (place,) = self._call(warehouse, what, remote_put, pack(batch))
        return Place(*place.tolist()) if place.numel() else None

    def get(self, warehouse: int, rows: Tensor, names: Sequence[str]) -> Batch:
        """Return the named columns of the rows, in this order. Raises KeyError, naming a missing row and column."""
        columns = torch.tensor([column_number(name) for name in names], dtype=torch.int64)
        (frame,) = self._call(warehouse, f"for {_columns_of_rows(names, rows)} from", remote_get, rows, columns)
        return read_frame(frame)

    def leave(self, *, graceful: bool) -> None:
        """Leave RPC; after a failed request, or if not `graceful`, without waiting for others."""
        global _hosted
        try:
            if self._joined:
                leave_rpc(self._world, graceful=graceful and not self._failed, timeout_seconds=self._timeout_seconds)
        finally:
            self._joined = False
            _hosted = None

    def _call(self, warehouse: int, what: str, function: Callable[..., Any], *tensors: Tensor) -> list[Tensor]:
        """Run a remote function at a warehouse. Raises TimeoutError or ConnectionError if it can't."""
        host = self._world.launch.first_rank_of(warehouse)
        started = time.perf_counter()
        try:
            answer = rpc.rpc_sync(_worker_name(host), function, tensors, timeout=self._timeout_seconds)
        except RuntimeError as error:
            self._failed = True
            waited = f"rank {self._world.rank} waited {time.perf_counter() - started:.1f} s"
            who = f"{waited} {what} warehouse {warehouse} (rank {host})"
            raise _explained(who, error, self._timeout_seconds) from error
        refusal, text, tensors = answer
        if refusal:
            who = f"warehouse {warehouse} (rank {host}), requested by rank {self._world.rank}"
            raise _REFUSALS[refusal](f"{who}: {text}")
        return list(tensors)


# Remote functions: the closed list that other processes may run here. They get only ids and frames, and return (kind of
# refusal, text, tensors), so that no exception object travels.

_hosted: Warehouse | None = None
_REFUSALS: dict[str, type[Exception]] = {"KeyError": KeyError, "ValueError": ValueError}


def remote_put(frame: Tensor) -> tuple[str, str, list[Tensor]]:
    """Store the batch of this frame; returns its place in the node's memory."""

    def put(warehouse: Warehouse) -> list[Tensor]:
        return [torch.tensor(warehouse.put(read_frame(frame)) or (), dtype=torch.int64)]

    return _answered(put)


def remote_get(rows: Tensor, columns: Tensor) -> tuple[str, str, list[Tensor]]:
    """Return the columns with these schema numbers of these rows, as a frame."""

    def get(warehouse: Warehouse) -> list[Tensor]:
        numbers = columns.tolist()
        if any(not 0 <= number < len(RULES) for number in numbers):
            raise ValueError(f"column numbers {numbers} are requested, but the schema has {len(RULES)} columns")
        return [pack(warehouse.get(rows, [RULES[number].name for number in numbers]))]

    return _answered(get)


def _answered(work: Callable[[Warehouse], list[Tensor]]) -> tuple[str, str, list[Tensor]]:
    if _hosted is None:
        return "ValueError", "no warehouse lives in this process", []
    try:
        return "", "", work(_hosted)
    except (KeyError, ValueError) as error:
        return "KeyError" if isinstance(error, KeyError) else "ValueError", str(error.args[0]), []


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
