"""The device mesh of the update layout, with the groups that engines talk over."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from spmdrl.resources.device import Device
from spmdrl.resources.layout import UpdateLayout


@dataclass(frozen=True)
class UpdateMesh:
    """Axes of the update layout. Both `data` and `shard` split the rows of a batch."""

    layout: UpdateLayout
    data_shard: DeviceMesh
    """what `fully_shard` takes: 1-D (shard), or 2-D (data, shard) where weights are replicated too"""
    rank: int

    @property
    def data_size(self) -> int:
        """Ranks among which the rows of a batch are split."""
        return self.layout.data * self.layout.shard

    @property
    def data_rank(self) -> int:
        return self.rank

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The group over which rows are split: the whole world."""
        return None

    @property
    def shard_size(self) -> int:
        return self.layout.shard

    @property
    def shard_rank(self) -> int:
        return self.rank % self.layout.shard


def build_update_mesh(layout: UpdateLayout, device: Device, rank: int) -> UpdateMesh:
    """Build the mesh of a fitted layout. Collective over all ranks."""
    if layout.data == 1:
        mesh = init_device_mesh(device.kind, (layout.shard,), mesh_dim_names=("shard",))
    else:
        mesh = init_device_mesh(device.kind, (layout.data, layout.shard), mesh_dim_names=("data", "shard"))
    return UpdateMesh(layout, mesh, rank)
