"""Counts the bytes that collectives send, by the axis of the update layout that they run over.

Counted is what the calls imply, not what a network carries: the bytes that a rank sends in the usual ring algorithms,
and in an all-to-all those that aren't for the rank itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from spmdrl.resources.mesh import Axis, UpdateMesh

ALL_RANKS = "all"
"""In place of an axis, for what all ranks exchange: loss, norm and metrics."""

Given = Mapping[str, Any]
"""What a collective was called with, by the names in its schema."""


class Traffic(TorchDispatchMode):
    """Adds up what this rank sends while it is entered: in forward and backward, by us, FSDP2 and pipelining."""

    def __init__(self, axis_of_group: Mapping[str, str]):
        """Name the axis of each process group by the group's name; see `axes_of_groups`."""
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self._axis_of_group = axis_of_group

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func, args)
        return func(*args, **(kwargs or {}))

    def _count(self, func: Any, args: tuple) -> None:
        name = str(func).split(".")[1]
        # A new kind of collective must not go uncounted.
        assert name in _SENT_BYTES, f"no rule for the bytes that {func} sends"
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        group = dist.ProcessGroup.unbox(given["process_group"])
        if num_bytes := round(_SENT_BYTES[name](given, group)):
            self.bytes[self._axis_of_group.get(group.group_name, ALL_RANKS)] += num_bytes


def _size(given: Given, name: str) -> int:
    """Bytes of an argument that is a tensor or a list of them."""
    value = given[name]
    return value.nbytes if isinstance(value, Tensor) else sum(tensor.nbytes for tensor in value)


def _others(group: dist.ProcessGroup) -> float:
    """The share of a whole that isn't a rank's own."""
    return (group.size() - 1) / group.size()


def _exchanged(given: Given, group: dist.ProcessGroup) -> float:
    counts = given["input_split_sizes"]
    if not counts:
        return _others(group) * _size(given, "input")
    return _size(given, "input") * (1 - counts[group.rank()] / max(1, sum(counts)))


_SENT_BYTES: dict[str, Callable[[Given, dist.ProcessGroup], float]] = {
    "allreduce_": lambda given, group: 2 * _others(group) * _size(given, "tensors"),
    "allgather_": lambda given, group: (group.size() - 1) * _size(given, "input_tensors"),
    "_allgather_base_": lambda given, group: (group.size() - 1) * _size(given, "input_tensor"),
    "_reduce_scatter_base_": lambda given, group: _others(group) * _size(given, "input_tensor"),
    "alltoall_base_": _exchanged,
    # The last rank of the ring sends nothing on; all together send n - 1 times the whole.
    "broadcast_": lambda given, group: _others(group) * _size(given, "tensors"),
    "send": lambda given, group: _size(given, "tensors"),
    "recv_": lambda given, group: 0,
}


def axes_of_groups(mesh: UpdateMesh) -> dict[str, str]:
    """The axis of each process group by the group's name. FSDP2's are shard and data, and expert_shard for experts."""
    names: dict[str, str] = {}
    for axis in (mesh.pipeline, mesh.data, mesh.context, mesh.tensor, mesh.expert):
        if axis.group is not None:
            names[axis.group.group_name] = axis.name
    if mesh.expert.size > 1:
        names |= {group.group_name: "expert_shard" for group in mesh.expert_shards.get_all_groups()}
    *replicas, shards = mesh.dense_shards.get_all_groups()
    names |= {group.group_name: "data" for group in replicas}
    return {**names, shards.group_name: "shard"}


def with_own_groups(mesh: UpdateMesh) -> UpdateMesh:
    """The same mesh, with a process group for each axis that takes all ranks. Collective over all ranks.

    PyTorch lets such axes share the default group, which would hide who sends what.
    """
    axes = {axis.name: axis for axis in (mesh.pipeline, mesh.data, mesh.context, mesh.tensor, mesh.expert)}
    return replace(
        mesh, dense_shards=_own_shards(mesh.dense_shards), **{name: _own_axis(axis) for name, axis in axes.items()}
    )


def _own_axis(axis: Axis) -> Axis:
    return replace(axis, group=dist.new_group()) if axis.size == dist.get_world_size() else axis


def _own_shards(shards: DeviceMesh) -> DeviceMesh:
    groups = [dist.new_group() if group is dist.group.WORLD else group for group in shards.get_all_groups()]
    whole = groups if shards.ndim > 1 else groups[0]
    return DeviceMesh.from_group(whole, shards.device_type, shards.mesh, mesh_dim_names=shards.mesh_dim_names)
