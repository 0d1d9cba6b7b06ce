"""How many blocks the KV cache may have."""

from __future__ import annotations

import os

import torch

from spmdrl.engines.generation.rollout_config import RolloutConfig
from spmdrl.engines.parallel.axis_collectives import max_across
from spmdrl.resources.host_memory import free_host_bytes
from spmdrl.resources.mesh import Axis
from spmdrl.resources.startup.launch import read_launch_environment


def affordable_blocks(rollout: RolloutConfig, block_bytes: int, device: torch.device, axis: Axis) -> int:
    """Blocks that the configured size, or the configured share of the memory, has room for now.

    Raises ValueError where that is less than two. Collective over the replica's ranks, whose schedulers decide alike:
    all get the number of the one with the least room.
    """
    budget_bytes, source = _budget(rollout, device)
    num_blocks = -int(max_across(-torch.tensor(budget_bytes // block_bytes, device=device), axis))
    if num_blocks < 2:
        raise ValueError(
            f"{source} leaves {budget_bytes} bytes for the KV cache, but 2 blocks take {2 * block_bytes}; raise it or "
            "lower rollout.block_size"
        )
    return num_blocks


def _budget(rollout: RolloutConfig, device: torch.device) -> tuple[int, str]:
    """Bytes for the cache of this rank, and what says so."""
    share = rollout.gpu_memory_utilization
    if rollout.kv_cache_gib is not None:
        return int(rollout.kv_cache_gib * 2**30), f"rollout.kv_cache_gib {rollout.kv_cache_gib}"
    if device.type == "cpu":
        free_bytes, num_ranks = free_host_bytes(), read_launch_environment(os.environ).local_world_size
        source = f"rollout.gpu_memory_utilization {share} of {free_bytes} free bytes for {num_ranks} ranks of the host"
        return int(share * free_bytes / num_ranks), source
    backend = torch.get_device_module(device)
    backend.empty_cache()
    free_bytes, total_bytes = backend.mem_get_info(device)
    source = f"rollout.gpu_memory_utilization {share} of {total_bytes} bytes, of which {free_bytes} are free,"
    return int(share * total_bytes - (total_bytes - free_bytes)), source
