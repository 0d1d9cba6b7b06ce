from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from spmdrl.engines.generation.native.paged import CacheShape, PagedCache, affordable_bytes
from spmdrl.engines.generation.native.row_memory import Counts, blocks_within
from spmdrl.engines.models.mixers import StateKind
from spmdrl.nouns.settings.rollout_config import RolloutConfig
from spmdrl.resources.host_memory import free_host_bytes
from spmdrl.resources.mesh import lone_generation_mesh

CPU = torch.device("cpu")


def blocks_of(rollout: RolloutConfig, block_bytes: int) -> Counts:
    """Blocks of full attention that the settings give."""
    budget = affordable_bytes(rollout, CPU, lone_generation_mesh().tensor)
    return blocks_within(budget, {StateKind(): block_bytes}, rollout)


def test_a_configured_size_is_taken_in_whole_blocks() -> None:
    assert blocks_of(RolloutConfig(kv_cache_gib=1000.5 / 2**30), 100) == [10]


def test_on_a_cpu_the_ranks_of_a_host_share_a_share_of_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < free_host_bytes() <= total_bytes
    blocks = []
    for num_ranks in (1, 4):
        job = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "RANK": 0, "LOCAL_RANK": 0, "MASTER_PORT": 1}
        for name, value in {**job, "MASTER_ADDR": "localhost"}.items():
            monkeypatch.setenv(name, str(value))
        blocks += blocks_of(RolloutConfig(gpu_memory_utilization=0.5), 2**20)
    assert blocks[0] * 2**20 <= total_bytes / 2
    # Others take and free memory meanwhile.
    assert 2.5 < blocks[0] / blocks[1] < 6


def test_less_than_two_blocks_are_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"gpu_memory_utilization 1e-09 of \d+ free bytes for 1 ranks"):
        blocks_of(RolloutConfig(gpu_memory_utilization=1e-9), 1000)


def is_advised(address: int) -> bool:
    """Whether the kernel was asked to back this address of the process by huge pages."""
    holds = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            start, stop = (int(part, 16) for part in name.split("-"))
            holds = start <= address < stop
        elif holds and name == "VmFlags:":
            return "hg" in rest
    raise AssertionError(f"{address:x} isn't mapped")


@pytest.mark.cpu_only(reason="it is the host's memory")
@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir() or not Path("/proc/self/smaps").is_file(),
    reason="this kernel has no huge pages to ask for",
)
def test_a_large_cache_lies_in_huge_pages_and_keeps_what_it_holds_as_it_grows() -> None:
    shape = CacheShape(
        num_layers=2, block_size=32, num_kv_heads=4, head_size=32, value_head_size=32, dtype=torch.float32
    )
    cache = PagedCache(shape, CPU)
    for num_blocks in (400, 1000):
        cache.resize(num_blocks)
        for store in (*cache.stored(0), *cache.stored(1)):
            middle = store[num_blocks // 2]
            assert is_advised(middle.data_ptr()) and not middle.any()
        if num_blocks == 400:
            cache.stored(1)[0][3] = 7.0
    assert bool((cache.stored(1)[0][3] == 7.0).all())


@pytest.mark.cpu_only(reason="it is the host's memory")
@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="this system doesn't say what is resident")
def test_blocks_that_no_row_reaches_cost_no_memory() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    shape = CacheShape(
        num_layers=4, block_size=32, num_kv_heads=4, head_size=32, value_head_size=16, dtype=torch.float32
    )
    cache, before = PagedCache(shape, CPU), resident_bytes()
    cache.resize((1 << 30) // shape.block_bytes)
    for part in (part for layer in range(4) for part in cache.stored(layer)):
        part[:100] = 1.0
        assert not part[100:200].any()
    # Pages of 2 MiB at both ends of what each of 8 parts holds.
    assert resident_bytes() - before < 200 * shape.block_bytes + 8 * (4 << 20) + (16 << 20)
    del part
    cache.resize(0)
    assert resident_bytes() - before < 16 << 20


def test_a_cache_for_which_there_is_no_room_is_refused_with_its_size() -> None:
    shape = CacheShape(
        num_layers=1, block_size=1, num_kv_heads=1, head_size=1 << 40, value_head_size=1, dtype=torch.float32
    )
    with pytest.raises(MemoryError, match="out of memory: a KV cache of 4503599627370496 bytes"):
        PagedCache(shape, CPU).resize(1 << 10)
