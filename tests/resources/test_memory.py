from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from spmdrl.resources.memory import MemoryLedger


def test_the_ledger_keeps_bytes_by_owner_and_place():
    ledger = MemoryLedger()
    ledger.set("optimizer", "device", 80)
    before = ledger.snapshot("update")
    ledger.set("optimizer", "device", 0)
    ledger.set("optimizer", "host", 80)
    after = ledger.snapshot("generation")
    assert (before.stage, before.device["optimizer"], before.host["optimizer"]) == ("update", 80, 0)
    assert (after.stage, after.device["optimizer"], after.host["optimizer"]) == ("generation", 0, 80)
    assert ledger.bytes_of("optimizer") == 0 and ledger.bytes_of("optimizer", "host") == 80


def test_a_snapshot_has_the_peaks_since_the_one_before():
    ledger = MemoryLedger()
    ledger.set("update_weights", "device", 50)
    ledger.set("optimizer", "device", 80)
    assert ledger.snapshot("update").peak == 130
    ledger.set("optimizer", "device", 0)
    ledger.set("optimizer", "host", 1000)
    ledger.set("generation_weights", "device", 60)
    ledger.set("update_weights", "device", 0)
    ledger.set("kv_cache", "device", 40)
    switched = ledger.snapshot("to_generation")
    # What the switch began with counts: optimizer and generation weights took turns, so together it is no 190.
    held = {"update_weights": 50, "optimizer": 80, "generation_weights": 60, "kv_cache": 40}
    assert {owner: peak for owner, peak in switched.peaks.items() if peak} == held
    assert switched.peak == 130 and switched.device_bytes == 100
    ledger.set("kv_cache", "device", 60)
    ledger.set("kv_cache", "device", 0)
    generated = ledger.snapshot("generation")
    assert {owner: peak for owner, peak in generated.peaks.items() if peak} == {
        "generation_weights": 60, "kv_cache": 60,
    }  # fmt: skip
    assert generated.peak == 120 and generated.device_bytes == 60
    assert ledger.snapshot("update").peaks["kv_cache"] == 0
    assert switched.peaks["kv_cache"] == 40, "a snapshot doesn't change any more"


def test_an_unknown_owner_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="owners are"):
        MemoryLedger().set("weigths", "device", 1)  # type: ignore[arg-type]


TOUCHED_AND_RELEASED = """
import torch
from spmdrl.resources.memory import release_to_system, resident_bytes
torch.ones(1 << 18)
release_to_system()
before = resident_bytes()
blocks = [torch.ones(1 << 18) for _ in range(32)]  # 32 MiB in blocks that the allocator may keep
print(resident_bytes() - before)
del blocks
release_to_system()
print(resident_bytes() - before)
"""


def test_resident_memory_follows_what_is_touched_and_released():
    # In a process of its own: what other tests freed would be filled again, or go back meanwhile.
    grown, left = map(int, subprocess.check_output([sys.executable, "-c", TOUCHED_AND_RELEASED]).split())
    assert grown > 24 << 20
    assert left < 8 << 20


FREED_BESIDE_SMALL_BLOCKS = """
import ctypes, sys
from spmdrl.resources.memory import resident_bytes, return_large_blocks
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def block(size):
    place = libc.malloc(size)
    ctypes.memset(place, 1, size)
    return place
if sys.argv[1] == "returned":
    return_large_blocks()
libc.free(block(10 << 20))  # glibc keeps blocks as large as one that was freed.
before, large = resident_bytes(), []
for _ in range(20):
    large.append(block(9 << 20))
    block(100_000)
for place in large:
    libc.free(place)
print(resident_bytes() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
@pytest.mark.slow
def test_large_blocks_leave_the_process_when_they_are_freed_and_would_stay_otherwise():
    def kept(*, how: str, **variables: str) -> int:
        environment = {name: value for name, value in os.environ.items() if "MALLOC" not in name} | variables
        command = [sys.executable, "-c", FREED_BESIDE_SMALL_BLOCKS, how]
        return int(subprocess.run(command, capture_output=True, check=True, text=True, env=environment).stdout)

    assert kept(how="returned") < 20 << 20
    assert kept(how="kept") > 150 << 20
    # What the user asks for stays.
    assert kept(how="returned", MALLOC_MMAP_THRESHOLD_=str(64 << 20)) > 150 << 20
