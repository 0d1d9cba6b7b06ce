"""The host side of accelerators: slabs that hold whatever is swapped, wherever they end."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from spmdrl.dataflow.resharding.swap import PinnedStore, Swap
from spmdrl.resources.device import Device
from spmdrl.resources.memory import MemoryLedger

SLAB = 1 << 12


def test_state_comes_back_from_several_slabs_bit_for_bit(device: torch.device, tmp_path: Path) -> None:
    if device.type == "cpu":
        pytest.skip("beside a CPU swapped state lies in a file")
    tensors = {"a": torch.randn(3000, 7), "b": torch.randn(5).bfloat16(), "c": torch.arange(900), "d": torch.empty(0)}
    memory = torch.get_device_module(device)
    held_before = memory.memory_allocated()
    on_device = {name: tensor.to(device) for name, tensor in tensors.items()}
    shown: list[str] = []
    stores: list[PinnedStore] = []

    def make_store(place: Device, directory: Path) -> PinnedStore:
        stores.append(PinnedStore(place, slab_bytes=SLAB))
        return stores[-1]

    swap = Swap(Device(device.type, device.index), MemoryLedger(), tmp_path, make_store=make_store)
    swap.add_group("optimizer", lambda: {name: on_device[name] for name in shown})
    # More appears after the first step, as an optimizer's state does.
    for shown in (["b", "c"], list(tensors)):
        swap.to_host("optimizer")
        assert all(on_device[name].untyped_storage().nbytes() == 0 for name in shown)
        if shown == list(tensors):
            assert memory.memory_allocated() == held_before
        # As a stage would, that takes the freed memory.
        other = torch.full((30000,), torch.nan, device=device)
        swap.start_return("optimizer")
        swap.finish_return("optimizer")
        for name in shown:
            assert torch.equal(on_device[name].cpu().view(torch.uint8), tensors[name].view(torch.uint8)), name
        del other
    held = sum(tensor.nbytes for tensor in tensors.values())
    assert held <= stores[0].num_bytes < held + 2 * SLAB
    swap.close()
    assert stores[0].num_bytes == 0


def test_only_the_last_slab_is_larger_than_needed_and_every_size_is_one_that_pytorch_keeps(
    device: torch.device,
) -> None:
    if device.type == "cpu":
        pytest.skip("without an accelerator there is no pinned memory")
    store = PinnedStore(Device(device.type, device.index), slab_bytes=SLAB)
    for wanted, expected in (
        (0, 0),
        (100, 128),
        (100, 128),
        (5000, 128 + SLAB + 1024),
        (3 * SLAB, 128 + 1024 + 3 * SLAB),
    ):
        store.reserve(wanted)
        assert store.num_bytes == expected, wanted


@pytest.mark.cpu_only(reason="PyTorch pins nothing where there is no accelerator")
def test_a_host_that_can_not_pin_memory_is_refused_with_a_way_out() -> None:
    with pytest.raises(OSError, match=r"no pinned host memory for 100 bytes .*; start fewer ranks per node") as refused:
        PinnedStore(Device("cpu")).reserve(100)
    assert refused.value.errno == errno.ENOMEM
