from __future__ import annotations

import os

import pytest
import torch

from spmdrl.engines.generation.native.cache.paged import affordable_blocks
from spmdrl.engines.generation.rollout_config import RolloutConfig
from spmdrl.resources.host_memory import free_host_bytes
from spmdrl.resources.mesh import lone_generation_mesh

CPU = torch.device("cpu")
AXIS = lone_generation_mesh().tensor


def test_a_configured_size_is_taken_in_whole_blocks() -> None:
    assert affordable_blocks(RolloutConfig(kv_cache_gib=1000.5 / 2**30), 100, CPU, AXIS) == 10


def test_on_a_cpu_the_ranks_of_a_host_share_a_share_of_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < free_host_bytes() <= total_bytes
    blocks = []
    for num_ranks in (1, 4):
        job = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "RANK": 0, "LOCAL_RANK": 0, "MASTER_PORT": 1}
        for name, value in {**job, "MASTER_ADDR": "localhost"}.items():
            monkeypatch.setenv(name, str(value))
        blocks.append(affordable_blocks(RolloutConfig(gpu_memory_utilization=0.5), 2**20, CPU, AXIS))
    assert blocks[0] * 2**20 <= total_bytes / 2
    # Others take and free memory meanwhile.
    assert 2.5 < blocks[0] / blocks[1] < 6


def test_less_than_two_blocks_are_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"gpu_memory_utilization 1e-09 of \d+ free bytes for 1 ranks"):
        affordable_blocks(RolloutConfig(gpu_memory_utilization=1e-9), 1000, CPU, AXIS)
