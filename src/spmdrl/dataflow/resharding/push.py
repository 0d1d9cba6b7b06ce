"""The resharding flow between two sets of ranks: weights go from those that train to those that generate.

    idle -> to_generation() -> generating -> start_return() -> idle

Neither side gives up memory to the other, so nothing is swapped, and the ranks that train go on at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from spmdrl.dataflow.resharding.filling import GeneratorFilling, Watcher
from spmdrl.dataflow.resharding.flow import ReshardStats, groups_of
from spmdrl.dataflow.resharding.planning.slice_agreement import check_same_version
from spmdrl.dataflow.resharding.swap import storage_bytes
from spmdrl.engines.generation.protocol import GenerationEngine
from spmdrl.engines.models.lora import is_adapter
from spmdrl.engines.training.sharded_model import Shard
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.roles import POLICY, Role
from spmdrl.nouns.settings.flow_config import ReshardConfig
from spmdrl.observability.fault_points import faultpoint
from spmdrl.resources.collectives import max_over
from spmdrl.resources.memory import MemoryLedger
from spmdrl.resources.rank_sets import RankSets
from spmdrl.resources.world import World


class WeightPush:
    """Flow of this rank, which trains or generates."""

    swaps = False

    def __init__(
        self,
        world: World,
        sets: RankSets,
        trainers: Mapping[Role, TrainingEngine],
        generator: GenerationEngine,
        config: ReshardConfig,
        ledger: MemoryLedger,
    ):
        """`trainers` are empty on ranks that generate, and `generator` is idle on the others."""
        self._world = world
        self._sets = sets
        self._trainers = trainers
        self._generator = generator
        self._config = config
        self._ledger = ledger
        self._filling: GeneratorFilling | None = None
        self._groups = {role: groups_of(role, trainer) for role, trainer in trainers.items()}
        shapes = generator.weight_shapes()
        keeps = any(map(is_adapter, shapes))
        self._kept = [name for name in shapes if keeps and not is_adapter(name)]
        """weights that a generator with adapters gets once and keeps"""
        self._num_pushes = 0
        self._is_generating = False

    def to_generation(self) -> ReshardStats:
        """Fill and wake the generator with the trainers' present weights. Collective over all ranks.

        Raises what `GeneratorFilling.check` raises.
        """
        started = time.perf_counter()
        assert not self._is_generating, "start_return comes first"
        version = self._version()
        storage, shards = self._generator.wake_weights(()), self._shards()
        filling = self._planned(shards, storage)
        self._ledger.set("bucket", "device", filling.buffer_bytes)
        watcher = Watcher(woken=lambda names: self.account(), sent=lambda names: None)
        received = filling.run(shards, storage, version=version, watcher=watcher)
        faultpoint("reshard", *storage.values())
        self._ledger.set("bucket", "device", 0)
        if self._kept and self._num_pushes == 0:
            self._generator.keep_weights(self._kept)
        self._num_pushes += 1
        self._generator.wake_cache()
        self._generator.version = version
        self._is_generating = True
        self.account()
        filling.check(version)
        seconds = time.perf_counter() - started
        return ReshardStats(seconds, received.total, filling.planned_bytes, received.cross_node, move_seconds=seconds)

    def start_return(self) -> None:
        """Put the generator to sleep. Local."""
        assert self._is_generating, "to_generation comes first"
        self._generator.sleep()
        if self._filling is not None:
            self._filling.forget_storage()
        self._is_generating = False
        self._world.device.empty_cache()
        self.account()

    def to_update(self) -> ReshardStats:
        """Return at once: the training state is where it was."""
        if self._is_generating:
            self.start_return()
        return ReshardStats(0.0)

    @contextmanager
    def computing(self, role: Role) -> Iterator[None]:
        yield

    def bring(self, role: Role) -> ReshardStats:
        return ReshardStats(0.0)

    def release(self, role: Role) -> ReshardStats:
        return ReshardStats(0.0)

    def account(self) -> None:
        """Enter present bytes into the ledger."""
        held = self._generator.memory_bytes()
        for owner in ("generation_weights", "kv_cache", "decode_graphs"):
            self._ledger.set(owner, "device", held.get(owner, 0))
        for groups in self._groups.values():
            for owner, tensors in groups.items():
                self._ledger.set(owner, "device", storage_bytes(tensors().values()))

    def close(self) -> None:
        """Do nothing: there are no copies."""

    def _version(self) -> int:
        """Return the policy version of the ranks that train. Collective over all ranks."""
        own = 0
        if self._sets.update.is_member:
            own = self._trainers[POLICY].update_count
            with self._sets.update.alone():
                check_same_version(own)
        return int(max_over(torch.tensor([own])))

    def _shards(self) -> Mapping[str, Shard]:
        if not self._sets.update.is_member:
            return {}
        with self._sets.update.alone():
            return self._trainers[POLICY].shards_for(self._generator.weight_shapes())

    def _planned(self, shards: Mapping[str, Shard], storage: Mapping[str, Tensor]) -> GeneratorFilling:
        """Return the plan of this push; once the generator keeps weights, one without them. Collective."""
        if self._num_pushes == 0 or (self._kept and self._num_pushes == 1):
            kept = frozenset(self._kept if self._num_pushes else ())
            self._filling = GeneratorFilling(self._world, shards, self._generator, storage, self._config, kept=kept)
        assert self._filling is not None
        return self._filling
