from __future__ import annotations

import errno
import resource
from pathlib import Path

import pytest
import torch

from spmdrl.dataflow.resharding.swap import Left, Swap
from spmdrl.resources.device import Device
from spmdrl.resources.memory import MemoryLedger, release_to_system, resident_bytes


def make_swap(directory: Path, tensors: dict[str, torch.Tensor]) -> tuple[Swap, MemoryLedger]:
    ledger = MemoryLedger()
    swap = Swap(Device("cpu"), ledger, directory)
    swap.add_group("update_weights", lambda: tensors)
    return swap, ledger


def bring_back(swap: Swap) -> None:
    swap.start_return("update_weights")
    swap.finish_return("update_weights")


def test_weights_survive_a_round_trip_bit_for_bit(tmp_path):
    tensors = {"a": torch.randn(300, 7), "b": torch.randn(5).bfloat16(), "c": torch.arange(9), "d": torch.empty(0, 4)}
    tensors["a"][0, 0] = float("nan")
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    swap, ledger = make_swap(tmp_path, tensors)
    held = ledger.bytes_of("update_weights")
    assert held == sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())
    assert swap.to_host("update_weights") == Left(held, copied_bytes=held)
    assert ledger.bytes_of("update_weights") == 0 and ledger.bytes_of("update_weights", "host") >= held
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors.values())
    bring_back(swap)
    assert ledger.bytes_of("update_weights") == held
    for name, tensor in tensors.items():
        assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8))
    assert not list(tmp_path.iterdir()), "the swap file shows in its directory"


def test_views_of_one_storage_leave_with_the_last_of_them(tmp_path):
    flat = torch.arange(12.0)
    tensors = {"padded": flat[:4].view(2, 2), "other": flat[4:9], "alone": torch.ones(3)}
    swap, _ = make_swap(tmp_path, tensors)
    leaving = swap.leave("update_weights")
    leaving.move(["padded", "alone"])
    assert flat.untyped_storage().nbytes() == 48 and tensors["alone"].untyped_storage().nbytes() == 0
    leaving.move(["other", "unknown"])
    assert flat.untyped_storage().nbytes() == 0
    assert leaving.finish() == Left(48 + 12, copied_bytes=48 + 12)
    bring_back(swap)
    assert flat.tolist() == list(range(12)) and tensors["alone"].tolist() == [1, 1, 1]


def test_weights_are_copied_out_only_if_their_version_is_new(tmp_path):
    weights = torch.zeros(4)
    swap, _ = make_swap(tmp_path, {"w": weights})
    for value, version, expected in [(1, 1, 1), (2, 1, 1), (3, 2, 3), (4, None, 4), (5, 2, 5), (6, 2, 5)]:
        weights.fill_(value)  # a change without a new version is lost: so one sees that nothing was copied
        swap.to_host("update_weights", version=version)
        bring_back(swap)
        assert weights.tolist() == [expected] * 4


def test_state_that_appears_later_is_copied_although_its_version_is_the_same(tmp_path):
    tensors = {"a": torch.ones(4)}
    swap, ledger = make_swap(tmp_path, tensors)
    swap.to_host("update_weights", version=1)
    bring_back(swap)
    tensors["b"] = torch.full((6,), 2.0)
    swap.account("update_weights")
    assert ledger.bytes_of("update_weights") == 40
    swap.to_host("update_weights", version=1)
    bring_back(swap)
    assert tensors["a"].tolist() == [1] * 4 and tensors["b"].tolist() == [2] * 6


def test_verbs_out_of_order_are_refused_with_the_state(tmp_path):
    swap, _ = make_swap(tmp_path, {"w": torch.ones(4)})
    with pytest.raises(RuntimeError, match="'device'; move it to the host first"):
        swap.start_return("update_weights")
    with pytest.raises(RuntimeError, match="call start_return first"):
        swap.finish_return("update_weights")
    swap.to_host("update_weights")
    with pytest.raises(RuntimeError, match="its state is 'host'"):
        swap.to_host("update_weights")


def test_a_full_disk_keeps_the_weights_and_names_directory_and_bytes(tmp_path):
    weights = torch.arange(1 << 16).float()
    swap, ledger = make_swap(tmp_path, {"w": weights})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError, match=rf"no room in {tmp_path} for {1 << 18} bytes") as caught:
            swap.to_host("update_weights")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno in (errno.EFBIG, errno.ENOSPC)
    assert weights.tolist() == list(range(1 << 16)) and swap.is_on_device("update_weights")
    assert ledger.bytes_of("update_weights") == 1 << 18
    swap.to_host("update_weights")
    bring_back(swap)
    assert weights.tolist() == list(range(1 << 16))


def test_a_write_that_fails_half_way_brings_back_what_had_left(tmp_path):
    tensors = {"first": torch.ones(1 << 12), "second": torch.full((1 << 12,), 2.0)}
    swap, _ = make_swap(tmp_path, tensors)
    leaving = swap.leave("update_weights")
    leaving.move(["first"])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, hard))
    try:
        with pytest.raises(OSError, match="no room"):
            leaving.move(["second"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert swap.is_on_device("update_weights")
    assert tensors["first"].eq(1).all() and tensors["second"].eq(2).all()


def test_storage_that_cannot_be_freed_is_refused(tmp_path):
    weights = torch.ones(4)
    weights.numpy()
    swap, _ = make_swap(tmp_path, {"w": weights})
    with pytest.raises(RuntimeError, match="can't be freed in place"):
        swap.to_host("update_weights")


def test_replaced_state_is_not_kept_alive_after_its_return(tmp_path):
    tensors = {"w": torch.ones(8 << 20)}
    swap, _ = make_swap(tmp_path, tensors)
    swap.to_host("update_weights")
    bring_back(swap)
    tensors["w"] = torch.ones(1)
    release_to_system()
    before = resident_bytes()
    tensors["w"] = torch.ones(8 << 20)
    assert resident_bytes() - before > 24 << 20
