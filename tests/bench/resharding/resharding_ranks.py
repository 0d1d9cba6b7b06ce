"""A rank of the resharding bench: fills whole generation weights in several ways in turn, then switches for real."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from spmdrl.dataflow.resharding.flow import ReshardingFlow
from spmdrl.dataflow.resharding.gather import BucketGatherer
from spmdrl.dataflow.resharding.planning.cells import SlicedWeights
from spmdrl.dataflow.resharding.planning.slice_agreement import AgreedPlan, agree_on_plan
from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.make_model import RandomWeights
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.batch import whole_slice
from spmdrl.nouns.roles import POLICY
from spmdrl.nouns.settings.flow_config import Executor, ReshardConfig
from spmdrl.nouns.settings.rollout_config import RolloutConfig
from spmdrl.nouns.settings.training_config import OptimConfig, TrainingConfig
from spmdrl.resources.collectives import barrier
from spmdrl.resources.layout import UpdateLayout, fit_update_layout
from spmdrl.resources.memory import MemoryLedger, peak_resident_bytes, release_to_system, resident_bytes
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World
from tests.bench.harness.in_turn import in_turn
from tests.bench.resharding.plan_bytes import least_bytes

EXECUTORS: tuple[Executor, ...] = ("exact", "allgather")
FULL_TENSOR = "full_tensor"
"""The usual way elsewhere: each parameter whole on every rank, then copied."""
WAYS = (*EXECUTORS, FULL_TENSOR)


@dataclass(frozen=True)
class ReshardTask:
    """What every rank does."""

    model: DecoderConfig
    layout: UpdateLayout
    dtype: str
    """of the generation weights"""
    bucket_bytes: int
    rounds: int


@dataclass
class ReshardFigures:
    """What one rank measured; lists go by round."""

    least_bytes: int = 0
    """lower bound on what any way receives"""
    buffer_bytes: dict[str, int] = field(default_factory=dict)
    """by executor: what it may take at most"""
    received_bytes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    temporary_bytes: dict[str, list[int]] = field(default_factory=dict)
    """growth of resident memory at its peak, by way"""
    switch_seconds: list[float] = field(default_factory=list)
    update_bytes: int = 0
    generation_bytes: int = 0
    peak_bytes: list[int] = field(default_factory=list)
    """of a whole switch, by ledger"""
    peak_resident_bytes: list[int] = field(default_factory=list)
    """the same by resident memory, without what the process holds besides the two states"""


@dataclass(frozen=True)
class MeasuredMove:
    """What one move of weights took on this rank."""

    result: Any
    """what it returned: of a way to fill weights, the bytes received"""
    seconds: float
    """until all ranks have done it"""
    resident_growth: int
    """bytes of resident memory at its peak, beyond those before"""


def measure_move(move: Callable[[], Any]) -> MeasuredMove:
    """Call `move` once all ranks are here. Collective over all ranks."""
    barrier()
    release_to_system()
    # From here on the system counts the peak anew.
    Path("/proc/self/clear_refs").write_text("5")
    resident, started = resident_bytes(), time.perf_counter()
    result = move()
    barrier()
    return MeasuredMove(result, time.perf_counter() - started, max(0, peak_resident_bytes() - resident))


class ReshardBench:
    """A trainer and a generator of one model. All methods are collective over all ranks."""

    def __init__(self, world: World, task: ReshardTask):
        self._world, self._task = world, task
        layout = fit_update_layout(task.layout, world.size)
        mesh = build_update_mesh(layout, world.device, world.rank)
        self._trainer = TrainingEngine(task.model, TrainingConfig(), OptimConfig(), mesh, world.device)
        self._trainer.load(RandomWeights(task.model, seed=0))
        # Once: none of the ways is to be measured with it.
        self._shards = self._trainer.named_shards()
        self._tensor_mesh = None if mesh.tensor.group is None else DeviceMesh.from_group(mesh.tensor.group, "cpu")
        device, dtype = world.device.torch_device, getattr(torch, task.dtype)
        self._generator = NativeEngine(task.model, RolloutConfig(), device, dtype)

    def measure(self) -> ReshardFigures:
        found = ReshardFigures()
        self._compare_ways(found)
        self._generator.wake_cache()
        self._generator.sleep()
        with tempfile.TemporaryDirectory() as folder:
            self._switch(found, Path(folder))
        return found

    def _compare_ways(self, found: ReshardFigures) -> None:
        storage = self._generator.wake_weights()
        agreed = self._agree(storage)
        found.least_bytes = least_bytes(agreed.plan)[self._world.rank]
        ways: dict[str, Callable[[], int]] = {FULL_TENSOR: functools.partial(self._copy_whole, storage)}
        for executor in EXECUTORS:
            gatherer = BucketGatherer(
                agreed.plan,
                self._world.rank,
                executor=executor,
                dtypes=agreed.dtypes,
                device=self._world.device.torch_device,
            )
            found.buffer_bytes[executor] = gatherer.buffer_bytes
            ways[executor] = functools.partial(self._gather, gatherer, storage)
            for tensor in storage.values():
                tensor.fill_(-1)
            ways[executor]()
            self._check(storage, executor)
        turns = in_turn({way: functools.partial(measure_move, ways[way]) for way in WAYS}, self._task.rounds)
        for way, turn in turns.items():
            found.received_bytes[way] = turn.results[-1].result
            found.seconds[way] = [move.seconds for move in turn.results]
            found.temporary_bytes[way] = [move.resident_growth for move in turn.results]

    def _agree(self, storage: dict[str, Tensor]) -> AgreedPlan:
        wanted = {whole_slice(name, tensor.shape): tensor.dtype for name, tensor in storage.items()}
        return agree_on_plan(
            [shard.slice for shard in self._shards.values()],
            wanted,
            {name: shard.global_shape for name, shard in self._shards.items()},
            self._task.bucket_bytes,
            ranks_per_node=self._world.launch.local_world_size,
            # Buckets for both executors.
            executor="allgather",
        )

    def _gather(self, gatherer: BucketGatherer, storage: dict[str, Tensor]) -> int:
        held = SlicedWeights({shard.slice: shard.tensor for shard in self._shards.values()})
        wanted = SlicedWeights({whole_slice(name, tensor.shape): tensor for name, tensor in storage.items()})
        received = [gatherer.gather_bucket(i, held, wanted).total for i in range(len(gatherer.block.buckets))]
        gatherer.release()
        return sum(received)

    def _copy_whole(self, storage: dict[str, Tensor]) -> int:
        """Fills the storage from whole parameters; the bytes received."""
        received = 0
        for name, whole in self._whole_weights():
            received += whole.nbytes - self._shards[name].tensor.nbytes
            storage[name].copy_(whole)
        return received

    @torch.no_grad()
    def _whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._trainer.model.named_parameters():
            assert isinstance(parameter, DTensor), name
            part = parameter.full_tensor()
            shape = self._shards[name].global_shape
            cut = [dim for dim, size in enumerate(shape) if part.shape[dim] != size]
            if cut and self._tensor_mesh is not None:
                part = DTensor.from_local(part, self._tensor_mesh, [Shard(cut[0])], run_check=False).full_tensor()
            yield name, part

    def _check(self, storage: dict[str, Tensor], executor: Executor) -> None:
        for name, whole in self._whole_weights():
            assert torch.equal(storage[name], whole.to(storage[name].dtype)), f"{executor} changed {name}"

    def _switch(self, found: ReshardFigures, folder: Path) -> None:
        ledger = MemoryLedger()
        config = ReshardConfig(bucket_bytes=self._task.bucket_bytes)
        flow = ReshardingFlow(self._world, {POLICY: self._trainer}, self._generator, config, ledger, folder)
        for _ in range(self._task.rounds):
            flow.account()
            found.update_bytes = ledger.snapshot("update").device_bytes
            move = measure_move(flow.to_generation)
            found.switch_seconds.append(move.seconds)
            found.peak_resident_bytes.append(move.resident_growth + found.update_bytes)
            held = ledger.snapshot("to_generation")
            found.peak_bytes.append(held.peak)
            found.generation_bytes = held.device_bytes
            flow.start_return()
            flow.to_update()
        flow.close()


def measure_resharding(world: World, task: ReshardTask) -> ReshardFigures:
    """What this rank measured. Collective over all ranks."""
    return ReshardBench(world, task).measure()
