"""Decision to swap a run's training state, made once from sizes that every rank agrees on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from spmdrl.config.config import Config
from spmdrl.dataflow.resharding.swap import storage_bytes
from spmdrl.dataflow.samples.balancing.balance import most_groups_each
from spmdrl.engines.generation.protocol import GenerationEngine
from spmdrl.engines.models.hf.model_folder import compute_dtype
from spmdrl.engines.models.lora import is_adapter
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.job.model.replica import Replica, groups_at_once
from spmdrl.job.run.run_logs import RunLogs
from spmdrl.nouns.roles import POLICY, Role
from spmdrl.nouns.settings.flow_config import SwapMode
from spmdrl.resources.collectives import max_over
from spmdrl.resources.host_memory import free_host_bytes, is_memory_folder
from spmdrl.resources.memory import resident_bytes
from spmdrl.resources.world import World

_GIB = 1 << 30


@dataclass(frozen=True)
class StateBytes:
    """Largest bytes on a rank, by kind."""

    models: int
    """weights and optimizer state of all roles"""
    gradients: int
    """gradients of the largest trained model: one is updated at a time"""
    generation_weights: int
    """generation weights that it lacks during updates"""
    kv_cache: int
    """KV cache of all rows generated at once"""
    bucket: int
    kept: int = 0
    """generation weights that stay during updates"""
    program: int = 0
    """interpreter and libraries, if they share the memory"""

    @property
    def together(self) -> int:
        """Largest sum at one time if nothing is swapped, without activations.

        Gradients end with the update, before generation takes its memory.
        """
        generation = self.generation_weights + self.kv_cache + self.bucket
        return self.program + self.models + self.kept + max(self.gradients, generation)


@dataclass(frozen=True)
class Residence:
    """A run's decision, from numbers that all ranks agreed on."""

    mode: SwapMode
    needed_bytes: int
    """bytes needed on the fullest rank if nothing is swapped"""
    room_bytes: int
    """bytes of room on the rank with the least"""

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.room_bytes

    @property
    def swaps(self) -> bool:
        return self.mode == "always" or (self.mode == "auto" and not self.fits)

    @property
    def sentence(self) -> str:
        """Decision with figures, such as `swap: never needed, 3.1 of 22 GiB`."""
        figures = f"{self.needed_bytes / _GIB:.1f} of {self.room_bytes / _GIB:.1f} GiB"
        if self.mode == "auto":
            return f"swap: never needed, {figures}" if self.fits else f"swap: at every switch, else {figures}"
        if self.mode == "always":
            return f"swap: at every switch, as reshard.swap is always (else {figures})"
        warning = "" if self.fits else "WARNING: "
        return f"{warning}swap: never, as reshard.swap is never ({figures})"

    @property
    def summary(self) -> dict[str, object]:
        return {**asdict(self), "swaps": self.swaps}


# A CPU's activations, the page cache and other programs need memory too, and the free memory is an estimate.
_SHARE_OF_A_HOST = 0.8
_PROGRAM_BYTES = 512 << 20


def decide_residence(
    config: Config, world: World, trainers: Mapping[Role, TrainingEngine], replica: Replica, *, num_rows: int
) -> Residence:  # fmt: skip
    """Decide whether the training state leaves the device for generation. Collective over the world.

    `num_rows` counts the rows that all replicas together generate at once.
    """
    needed = state_bytes(config, world, trainers, replica, num_rows=num_rows).together
    # Equal on every rank: the fullest one's, and the one's with the least room.
    agreed = max_over(torch.tensor([needed, -room_bytes(world, config.rollout.gpu_memory_utilization)]))
    return Residence(config.reshard.swap, needed_bytes=int(agreed[0]), room_bytes=-int(agreed[1]))


def state_bytes(
    config: Config, world: World, trainers: Mapping[Role, TrainingEngine], replica: Replica, *, num_rows: int
) -> StateBytes:
    """Return this rank's bytes without a swap."""
    row_tokens = config.data.max_prompt_length + config.rollout.max_completion_length
    group_size = config.rollout.num_generations
    groups_each = most_groups_each(-(-num_rows // group_size), len(replica.mesh.replicas))
    policy, engine, dtype = trainers[POLICY], replica.engine, compute_dtype(config.model, world.device.kind)
    has_adapters = any(map(is_adapter, engine.weight_shapes()))

    def is_kept(name: str) -> bool:
        return has_adapters and not policy.updates(name)

    return StateBytes(
        models=sum(_weight_bytes(one) + storage_bytes(one.optimizer_tensors()) for one in trainers.values()),
        gradients=max(_weight_bytes(one, one.updates) for role, one in trainers.items() if role.is_trained),
        generation_weights=_generation_bytes(engine, dtype, lambda name: not is_kept(name)),
        kept=_generation_bytes(engine, dtype, is_kept),
        kv_cache=engine.cache_bytes_for(
            **groups_at_once(config, groups_each, group_size), num_tokens=min(row_tokens, policy.config.max_positions)
        ),
        bucket=config.reshard.bucket_bytes,
        program=_PROGRAM_BYTES if world.device.is_cpu else 0,
    )


def room_bytes(world: World, device_share: float) -> int:
    """Return memory for all of a rank's state: present bytes, and its part of the free ones.

    On an accelerator, `device_share` minus others' use: the state leaves as much to activations as
    `rollout.gpu_memory_utilization` does.
    """
    device = world.device
    memory = device.memory_bytes()
    if memory is None:
        return int(_SHARE_OF_A_HOST * (free_host_bytes() / world.launch.local_world_size + resident_bytes()))
    used, total = memory
    return int(device_share * total) - (used - device.module.memory_reserved())


def announce(residence: Residence, folder: Path, logs: RunLogs) -> None:
    """Print the decision and add it to the run's summary; warns if swapping to `folder` would free nothing."""
    logs.console.note(residence.sentence)
    if logs.world.device.is_cpu and residence.swaps and is_memory_folder(folder):
        logs.console.note(
            f"WARNING: {folder} is kept in memory (tmpfs), so that swapping to it frees none; point reshard.swap_dir "
            "at a folder on a disk"
        )
    logs.add_to_summary("where the swapped state goes", swap=residence.summary)


def _weight_bytes(engine: TrainingEngine, of: Callable[[str], bool] = lambda name: True) -> int:
    return storage_bytes(shard.tensor for name, shard in engine.named_shards().items() if of(name))


def _generation_bytes(engine: GenerationEngine, dtype: torch.dtype, of: Callable[[str], bool]) -> int:
    return sum(box.num_elements for name, box in engine.weight_slices().items() if of(name)) * dtype.itemsize
