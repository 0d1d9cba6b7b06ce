"""Meshes of the update and the generation layout: the axes over which engines communicate.

In the update layout, ranks are numbered with the tensor axis innermost, then context, shard, data and pipeline, so that
the axes with most traffic stay inside a node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.resources.collectives import max_over, sum_over, wait_like_the_job
from spmdrl.resources.device import Device
from spmdrl.resources.layout import GenerationLayout, UpdateLayout
from spmdrl.runtime.network.sockets import closing_new_listeners


@dataclass(frozen=True)
class Axis:
    """One axis of a layout, as this rank sees it."""

    name: str
    size: int
    rank: int
    """this rank's place on the axis"""
    group: dist.ProcessGroup | None
    """group of the ranks along the axis; None for a single one"""
    ranks: tuple[int, ...]
    """global ranks, by place"""

    def sum(self, x: Tensor) -> Tensor:
        """Return a new tensor with the elementwise sum over the ranks; no gradient. Collective over the axis."""
        return sum_over(x.detach(), self.group) if self.size > 1 else x.detach().clone()

    def max(self, x: Tensor) -> Tensor:
        """Return a new tensor with the elementwise maximum over the ranks; no gradient. Collective over the axis."""
        return max_over(x.detach(), self.group) if self.size > 1 else x.detach().clone()


@dataclass(frozen=True)
class UpdateMesh:
    """Axes of the update layout. Rows of a batch are split over `data`; the other axes share the same rows."""

    layout: UpdateLayout
    rank: int
    pipeline: Axis
    data: Axis
    """data x shard: every rank with rows of its own"""
    context: Axis
    tensor: Axis
    expert: Axis
    model: Axis
    """pipeline x context x tensor: the ranks that work on the same rows"""
    dense_shards: DeviceMesh
    """mesh for `fully_shard` of all weights but the experts': (shard x context), after (data) if there is one"""
    expert_shards: DeviceMesh
    """mesh for `fully_shard` of the experts' weights: data x shard x context over the expert axis"""

    @property
    def leaders(self) -> tuple[int, ...]:
        """First rank of each group of ranks that work on the same rows."""
        return tuple(place * self.context.size * self.tensor.size for place in range(self.data.size))


@dataclass(frozen=True)
class GenerationMesh:
    """Axes of the generation layout. Each replica generates for prompts of its own; its ranks do so in lockstep."""

    layout: GenerationLayout
    rank: int
    replicas: tuple[tuple[int, ...], ...]
    """ranks of each replica, by their place on its tensor axis"""
    tensor: Axis
    """ranks that share each matrix: this rank's replica"""
    expert: Axis
    """replicas that share the experts, each by its rank at this rank's place on the tensor axis"""

    @property
    def replica(self) -> int | None:
        """Number of this rank's replica; None on a rank that doesn't generate."""
        return next((number for number, ranks in enumerate(self.replicas) if self.rank in ranks), None)

    @property
    def is_leader(self) -> bool:
        """True if this rank is the first of its replica, which reports for it."""
        return self.rank in self.leaders

    @property
    def leaders(self) -> tuple[int, ...]:
        """First rank of each replica."""
        return tuple(ranks[0] for ranks in self.replicas)


def replicas_of(layout: GenerationLayout, ranks: range) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each replica of a checked layout over these, by their place on the tensor axis."""
    placed = [ranks[place] for place in sorted(range(len(ranks)), key=layout.place)]
    return tuple(tuple(placed[begin : begin + layout.tensor]) for begin in range(0, len(ranks), layout.tensor))


def copies_of_model(layout: UpdateLayout) -> Tensor:
    """Return the ranks that work on the same rows, a line for each copy of the model, [data x shard, ranks]."""
    places = _places(layout.pipeline, layout.data * layout.shard, layout.context, layout.tensor)
    return places.transpose(0, 1).flatten(1)


@closing_new_listeners()
def build_generation_mesh(
    layout: GenerationLayout, device: Device, world_size: int, rank: int, *, first: int = 0
) -> GenerationMesh:
    """Build the mesh of a checked layout over `world_size` ranks from `first` on. Collective over all ranks.

    A rank that isn't among them gets a mesh without a place of its own.
    """
    replicas = replicas_of(layout, range(first, first + world_size))
    num_sharing = max(1, layout.expert // layout.tensor)
    places = torch.tensor(replicas).view(-1, num_sharing, layout.tensor)
    mesh = DeviceMesh(device.kind, places, mesh_dim_names=("replicas", "expert", "tensor"))
    if not first <= rank < first + world_size:
        alone = lone_generation_mesh(rank)
        return replace(alone, layout=layout, replicas=replicas)
    _waiting(mesh)
    return GenerationMesh(
        layout, rank, replicas, tensor=_axis(mesh["tensor"], "tensor"), expert=_axis(mesh["expert"], "expert")
    )


def lone_generation_mesh(rank: int = 0) -> GenerationMesh:
    """Return the mesh of a rank that generates with whole weights, independently of the others."""
    tensor, expert = Axis("tensor", 1, 0, None, (rank,)), Axis("expert", 1, 0, None, (rank,))
    return GenerationMesh(GenerationLayout(), rank, ((rank,),), tensor, expert)


def build_update_mesh(layout: UpdateLayout, device: Device, rank: int) -> UpdateMesh:
    """Build the mesh of a layout fitted to all ranks. Collective over all ranks."""
    mesh = join_update_mesh(layout, device, rank)
    assert mesh is not None, f"rank {rank} isn't among the {layout.num_ranks} ranks of {layout}"
    return mesh


@closing_new_listeners()
def join_update_mesh(layout: UpdateLayout, device: Device, rank: int) -> UpdateMesh | None:
    """Build the mesh of a layout fitted to the job's first ranks; None on the others. Collective over all ranks."""
    mesh = _mesh(
        device, pipeline=layout.pipeline, data=layout.data * layout.shard, context=layout.context, tensor=layout.tensor
    )
    dense = _mesh(
        device, pipeline=layout.pipeline, replica=layout.data, shard=layout.shard * layout.context, tensor=layout.tensor
    )
    num_expert_replicas = layout.data * layout.shard * layout.context // (layout.expert * layout.expert_shard)
    experts = _mesh(
        device,
        pipeline=layout.pipeline,
        replica=num_expert_replicas,
        shard=layout.expert_shard,
        expert=layout.expert,
        tensor=layout.tensor,
    )
    # Made of its own: to flatten axes of a mesh needs a rank of it.
    model = DeviceMesh(device.kind, copies_of_model(layout), mesh_dim_names=("data", "model"))
    if rank >= layout.num_ranks:
        return None
    for one in (mesh, dense, experts, model):
        _waiting(one)
    return UpdateMesh(
        layout=layout,
        rank=rank,
        pipeline=_axis(mesh["pipeline"], "pipeline"),
        data=_axis(mesh["data"], "data"),
        context=_axis(mesh["context"], "context"),
        tensor=_axis(mesh["tensor"], "tensor"),
        expert=_axis(experts["expert"], "expert"),
        model=_axis(model["model"], "model"),
        dense_shards=dense["replica", "shard"] if layout.data > 1 else dense["shard"],
        expert_shards=experts["replica", "shard"] if num_expert_replicas > 1 else experts["shard"],
    )


def _mesh(device: Device, **sizes: int) -> DeviceMesh:
    """Return a mesh over the first ranks with these axes, outermost first."""
    return DeviceMesh(device.kind, _places(*sizes.values()), mesh_dim_names=tuple(sizes))


def _places(*sizes: int) -> Tensor:
    return torch.arange(math.prod(sizes), dtype=torch.int).view(sizes)


def _waiting(mesh: DeviceMesh) -> None:
    """Set the timeout of the mesh's groups to the job's own."""
    for group in mesh.get_all_groups():
        wait_like_the_job(group)


def _axis(mesh: DeviceMesh, name: str) -> Axis:
    size = mesh.size()
    ranks = tuple(mesh.mesh.flatten().tolist())
    return Axis(name, size, mesh.get_local_rank(), mesh.get_group() if size > 1 else None, ranks)
