"""Update and generation layouts: how many ranks each axis of parallelism takes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal


@dataclass(frozen=True)
class UpdateLayout:
    """Degrees of the update shards. `data` replicates, `shard` is FSDP2 (ZeRO-3); 0 means: what is left."""

    data: int = 1
    """replicas of the sharded model; gradients are averaged over them"""
    shard: int = 0
    """ranks that share one copy of weights, gradients and optimizer state; 0 takes all ranks that are left"""


@dataclass(frozen=True)
class GenerationLayout:
    """Degrees of the generation shards; the ranks that are left generate side by side."""

    tensor: int = 1
    """ranks that share one generation engine"""


@dataclass(frozen=True)
class ResourcesConfig:
    """What the job runs on."""

    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """the accelerator PyTorch finds, or one kind of device by name"""
    update: UpdateLayout = field(default_factory=UpdateLayout)
    """layout of the update shards"""
    generation: GenerationLayout = field(default_factory=GenerationLayout)
    """layout of the generation shards"""
    timeout_seconds: float = 1800.0
    """how long a collective may wait for its slowest rank before the job stops"""


def fit_update_layout(layout: UpdateLayout, world_size: int) -> UpdateLayout:
    """Fill in the degree that was left open, and check that the degrees take exactly all ranks.

    Raises ValueError with the numbers, the relation and a way out.
    """
    _check_degrees("resources.update", layout)
    if layout.data < 1:
        raise ValueError(f"resources.update.data is {layout.data}, but a layout has at least 1 replica; set it to 1")
    if layout.shard == 0:
        if world_size % layout.data:
            raise ValueError(
                f"resources.update.data {layout.data} does not divide the job's {world_size} ranks; "
                f"set it to one of {_divisors(world_size)}"
            )
        return UpdateLayout(layout.data, world_size // layout.data)
    needed = layout.data * layout.shard
    if needed != world_size:
        raise ValueError(
            f"update layout needs data {layout.data} x shard {layout.shard} = {needed} ranks, but the job has "
            f"{world_size}; start {needed} ranks, or set resources.update.shard to 0 (all that are left)"
        )
    return layout


def check_generation_layout(layout: GenerationLayout, world_size: int) -> None:
    """Refuse generation degrees that the engines or the job can't have."""
    _check_degrees("resources.generation", layout)
    if layout.tensor < 1 or world_size % layout.tensor:
        raise ValueError(
            f"resources.generation.tensor {layout.tensor} does not divide the job's {world_size} ranks; "
            f"set it to one of {_divisors(world_size)}"
        )
    if layout.tensor != 1:
        raise ValueError(
            f"resources.generation.tensor is {layout.tensor}, but each rank generates with whole weights; set it to 1"
        )


def _check_degrees(key: str, layout: UpdateLayout | GenerationLayout) -> None:
    for item in fields(layout):
        degree = getattr(layout, item.name)
        if degree < 0:
            raise ValueError(f"{key}.{item.name} is {degree}, but a degree counts ranks; set it to 1 or more")


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]
