"""The paper's baseline: one replay buffer in rank 0's process, through which all samples go (arXiv:2507.19017, Fig. 2).

It is made to do well: payload travels as frames, in one request a put or take, and the buffer itself deals rows by
length, so that no metadata is sent.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable, Sequence
from types import TracebackType

import torch
import torch.distributed.rpc as rpc
from torch import Tensor

from spmdrl.dataflow.data.prompts import Prompt, prompt_columns
from spmdrl.dataflow.samples.schema import RULES, column_number
from spmdrl.dataflow.samples.store.frame import pack, read_frame
from spmdrl.dataflow.samples.transport.rpc_agent import join_rpc, leave_rpc
from spmdrl.dataflow.samples.volume import Link, Volume, column_bytes
from spmdrl.nouns.batch import Batch, WorkerState
from spmdrl.resources.collectives import barrier
from spmdrl.resources.world import World

_HOST = "central0"


class CentralBuffer:
    """All columns of all rows of a batch. Thread-safe: RPC threads and rank 0 call it at once."""

    def __init__(self, num_takers: int):
        self._num_takers = num_takers
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self._prompts, self._group_size = Batch.of_rows([]), 1
        self._puts: dict[tuple[str, ...], list[Batch]] = {}
        self._joined: dict[tuple[str, ...], Batch] = {}
        self._shares: list[Tensor] = []

    def put_prompts(self, prompts: Batch, group_size: int) -> None:
        """Keep each prompt once for its group."""
        self._prompts, self._group_size = prompts, group_size

    def put(self, batch: Batch) -> None:
        """Keep columns of some rows; those put together must be there for all rows before any of them is taken."""
        with self._lock:
            self._puts.setdefault(tuple(batch.names), []).append(batch)

    def take(self, taker: int, names: Iterable[str]) -> Batch:
        """The named columns of the rows of one taker."""
        wanted = set(names)
        with self._lock:
            # Others may be complete only later.
            sources = [self._joined_columns(made) for made in self._puts if wanted & set(made)]
            rows = self._share(taker)
        out = Batch(rows)
        for source, places in [(self._prompts, rows // self._group_size), *((source, rows) for source in sources)]:
            chosen = [name for name in source.names if name in wanted]
            if chosen:
                out.update(source.select(places, chosen))
        assert wanted == set(out.names), f"the buffer has no columns {sorted(wanted - set(out.names))}"
        return out

    def _joined_columns(self, names: tuple[str, ...]) -> Batch:
        """All rows' columns that were put together, in row order."""
        if names not in self._joined:
            joined = Batch.concatenate(self._puts[names])
            self._joined[names] = joined.select(joined.rows.argsort())
        return self._joined[names]

    def _share(self, taker: int) -> Tensor:
        """The rows of one taker: of all rows the longest first, each to who has the fewest tokens."""
        if not self._shares:
            responses = next(part for part in self._joined.values() if "response_ids" in part)
            prompts = self._prompts.lengths("prompt_ids")[responses.rows // self._group_size]
            lengths = (prompts + responses.lengths("response_ids")).tolist()
            loads = [(0, number) for number in range(self._num_takers)]
            shares: list[list[int]] = [[] for _ in loads]
            for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
                load, number = loads[0]
                shares[number].append(row)
                heapq.heapreplace(loads, (load + lengths[row], number))
            self._shares = [torch.tensor(sorted(share), dtype=torch.int64) for share in shares]
        return self._shares[taker]


# What another process may run in rank 0's.

_hosted: CentralBuffer | None = None


def remote_put(frame: Tensor) -> None:
    """Keep the batch of a frame."""
    _buffer().put(read_frame(frame))


def remote_take(taker: int, columns: Tensor) -> Tensor:
    """A frame of the columns with these schema numbers of the rows of one taker."""
    return pack(_buffer().take(taker, [RULES[number].name for number in columns.tolist()]))


def _buffer() -> CentralBuffer:
    if _hosted is None:
        raise RuntimeError("the central buffer lives in rank 0's process only")
    return _hosted


class CentralDock:
    """Opens and closes batches as the transfer dock does. Opening and leaving are collective over all ranks."""

    def __init__(self, world: World, timeout_seconds: float):
        self.world = world
        self.volume = Volume()
        self._timeout_seconds = timeout_seconds
        global _hosted
        _hosted = CentralBuffer(world.size) if world.is_main else None
        if world.size > 1:
            join_rpc(f"central{world.rank}", world, [remote_put, remote_take], timeout_seconds, plain_tcp=True)

    def open_batch(self, step: int, prompts: Sequence[Prompt], group_size: int) -> CentralSamples:
        """Store the prompts, which every rank has. Nothing is communicated."""
        if _hosted is not None:
            _hosted.put_prompts(prompt_columns(prompts), group_size)
        return CentralSamples(self, len(prompts) * group_size, group_size)

    def close_batch(self, samples: CentralSamples) -> None:
        """Forget all rows. Collective over all ranks."""
        if _hosted is not None:
            _hosted.clear()
        barrier()

    def __enter__(self) -> CentralDock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        global _hosted
        if self.world.size > 1:
            leave_rpc(self.world, graceful=kind is None, timeout_seconds=self._timeout_seconds)
        _hosted = None


class CentralSamples:
    """The rows of one step, in the central buffer; its methods are those of the dock's samples."""

    def __init__(self, dock: CentralDock, num_rows: int, group_size: int):
        self.num_rows = num_rows
        self.group_size = group_size
        self._dock, self._world = dock, dock.world
        self._generated: list[int] = []

    def deal_generation(self) -> list[int]:
        """The rows, in whole groups, that this rank generates: equally many each."""
        rank, size, num_groups = self._world.rank, self._world.size, self.num_rows // self.group_size
        first, stop = (number * num_groups // size * self.group_size for number in (rank, rank + 1))
        self._generated = list(range(first, stop))
        return self._generated

    def take(self, state: WorkerState, names: Iterable[str]) -> Batch:
        """This rank's share of all rows, with the named columns."""
        wanted = sorted(names)
        if _hosted is not None:
            batch = _hosted.take(self._world.rank, wanted)
        else:
            columns = torch.tensor([column_number(name) for name in wanted], dtype=torch.int64)
            batch = read_frame(rpc.rpc_sync(_HOST, remote_take, (self._world.rank, columns)))
        self._dock.volume.count_get(self._link, column_bytes(batch))
        return batch

    def take_generated(self, state: WorkerState) -> list[int]:
        """The rows that this rank generated; nothing is moved."""
        return self._generated

    def put(self, state: WorkerState, batch: Batch) -> None:
        """Store columns in the buffer."""
        self._dock.volume.count_put(self._link, column_bytes(batch))
        if _hosted is not None:
            _hosted.put(batch)
        else:
            rpc.rpc_sync(_HOST, remote_put, (pack(batch),))

    def commit(self, state: WorkerState) -> None:
        """Wait until all ranks have put and taken all that they do in `state`. Collective over all ranks."""
        barrier()

    @property
    def _link(self) -> Link:
        if self._world.is_main:
            return Link.PROCESS
        return Link.NODE if self._world.node == 0 else Link.CROSS_NODE
