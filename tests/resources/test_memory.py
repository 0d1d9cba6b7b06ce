from __future__ import annotations

import pytest
import torch

from spmdrl.resources.memory import MemoryLedger, release_to_system, resident_bytes


def test_the_ledger_keeps_bytes_by_owner_and_place_and_device_peaks():
    ledger = MemoryLedger()
    ledger.set("optimizer", "device", 80)
    before = ledger.snapshot("update")
    ledger.add("optimizer", "device", -80)
    ledger.add("optimizer", "host", 80)
    after = ledger.snapshot("generation")
    assert (before.stage, before.device["optimizer"], before.host["optimizer"]) == ("update", 80, 0)
    assert (after.stage, after.device["optimizer"], after.host["optimizer"]) == ("generation", 0, 80)
    assert ledger.peak("optimizer") == 80 and ledger.bytes_of("optimizer") == 0


def test_an_unknown_owner_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="owners are"):
        MemoryLedger().set("weigths", "device", 1)  # type: ignore[arg-type]


def test_resident_memory_follows_what_is_touched_and_released():
    release_to_system()
    before = resident_bytes()
    blocks = [torch.ones(1 << 18) for _ in range(32)]  # 32 MiB in blocks that the allocator may keep
    grown = resident_bytes() - before
    del blocks
    release_to_system()
    assert grown > 24 << 20
    assert resident_bytes() - before < 8 << 20
