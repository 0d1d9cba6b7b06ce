"""The world of ranks: launch environment, device and process group, opened and closed together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from spmdrl.resources.device import Device, find_device
from spmdrl.resources.launch import LaunchEnvironment, read_launch_environment


@dataclass(frozen=True)
class World:
    """This rank's view of the job."""

    launch: LaunchEnvironment
    device: Device

    @property
    def rank(self) -> int:
        return self.launch.rank

    @property
    def size(self) -> int:
        return self.launch.world_size

    @property
    def local_rank(self) -> int:
        return self.launch.local_rank

    @property
    def node(self) -> int:
        return self.launch.node_rank

    @property
    def num_nodes(self) -> int:
        return self.launch.num_nodes

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the run's files and the screen."""
        return self.rank == 0


@contextlib.contextmanager
def open_world(device: str = "auto", timeout_seconds: float = 1800.0) -> Iterator[World]:
    """Join the job's process group, and leave it at the end. Collective over all ranks.

    A job of one rank gets a group too, over an in-process store that opens no port.
    """
    launch = read_launch_environment(os.environ)
    world = World(launch, find_device(device, launch.local_rank))
    world.device.select()
    keep_to_loopback(launch)
    backend, timeout = world.device.backend, timedelta(seconds=timeout_seconds)
    if launch.world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, rank=launch.rank, world_size=launch.world_size, timeout=timeout)
    try:
        yield world
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def keep_to_loopback(launch: LaunchEnvironment) -> None:
    """On one node, make gloo and TensorPipe listen on the loopback interface only."""
    if launch.num_nodes == 1 and os.path.exists("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("TP_SOCKET_IFNAME", "lo")


def make_deterministic() -> None:
    """Refuse nondeterministic kernels from here on (`debug.deterministic`)."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
