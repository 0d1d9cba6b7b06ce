"""Basic device operations: memory, streams, pinned copies and collectives, each checked by the bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.resources.device import Device
from spmdrl.verbs.doctor.stage_run import StageRun

_COPY_BYTES = {"full": 1 << 30, "small": 4 << 20}
_NUM_RACES = 20
_GIGA = 1e9


def check_device(run: StageRun) -> None:
    """Check every operation of `Device`, then the collectives. Collective over the world."""
    device, num_bytes = run.device, _COPY_BYTES[run.scale]
    # The kind alone selects this rank's device, as after `select`.
    is_selected = torch.empty(1, device=device.kind).device == device.torch_device
    run.require(is_selected, f"a tensor made on {device.kind!r} isn't on {device.torch_device}")
    _check_copies(run, num_bytes)
    if not device.is_cpu:
        _check_memory(run, num_bytes)
        _check_streams(run)
    for name, collective in _COLLECTIVES.items():
        run.require(collective(run), f"{name} over {run.world.size} ranks gives wrong values")
    if run.world.size > 1:
        tensor, size = torch.zeros(num_bytes // 4, device=device.torch_device), run.world.size
        seconds = median_seconds(lambda: dist.all_reduce(tensor), device)
        # Of a rank's links, as NCCL's tests count: 2 (n - 1) / n of the bytes each way.
        run.figures["all_reduce_gb_per_second"] = 2 * (size - 1) / size * num_bytes / seconds / _GIGA


def _check_copies(run: StageRun, num_bytes: int) -> None:
    """Copy within the device and, from and to pinned and other memory, between it and the host."""
    device = run.device
    source = torch.arange(num_bytes // 8, device=device.torch_device)
    target = torch.empty_like(source)
    seconds = median_seconds(lambda: target.copy_(source), device)
    run.require(torch.equal(source, target), "a copy within the device differs from its source")
    # Each byte is read and written.
    run.figures["device_copy_gb_per_second"] = 2 * num_bytes / seconds / _GIGA
    if device.is_cpu:
        return
    for name, pin in (("pinned", True), ("pageable", False)):
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=pin)
        out = median_seconds(partial(host.copy_, source, non_blocking=True), device)
        target.zero_()
        back = median_seconds(partial(target.copy_, host, non_blocking=True), device)
        run.require(torch.equal(source, target), f"a copy to {name} memory and back differs from its source")
        run.figures[f"{name}_to_host_gb_per_second"] = num_bytes / out / _GIGA
        run.figures[f"{name}_from_host_gb_per_second"] = num_bytes / back / _GIGA


def _check_memory(run: StageRun, num_bytes: int) -> None:
    device = run.device
    device.empty_cache()
    device.take_peak_bytes()
    before = _used(device)
    block = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
    device.synchronize()
    run.require(_used(device) - before >= num_bytes // 2, "allocated memory doesn't show in the device's used bytes")
    del block
    device.empty_cache()
    run.require(_used(device) - before < num_bytes // 2, "freed memory doesn't go back to the device by empty_cache")
    run.require(device.take_peak_bytes() >= num_bytes, "the peak of allocated bytes is less than what was allocated")
    run.require(device.take_peak_bytes() < num_bytes, "the peak of allocated bytes isn't reset")


def _used(device: Device) -> int:
    memory = device.memory_bytes()
    assert memory is not None, device
    return memory[0]


def _check_streams(run: StageRun) -> None:
    """Check that a side stream waits for the main one, copies its result, and fires the event after the copy."""
    device = run.device
    side = device.module.Stream()
    values = torch.zeros(1 << 20, dtype=torch.int64, device=device.torch_device)
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    for number in range(1, _NUM_RACES + 1):
        values.fill_(number)
        side.wait_stream(device.module.current_stream())
        with device.module.stream(side):
            host.copy_(values, non_blocking=True)
            copied = device.module.Event()
            copied.record(side)
        device.module.current_stream().wait_event(copied)
        values.zero_()
        copied.synchronize()
        if not bool((host == number).all()):
            run.faults.append(f"round {number}: a copy on a side stream didn't wait for the kernel before it")
            return


def _all_reduce(run: StageRun) -> bool:
    tensor = _own(run)
    dist.all_reduce(tensor)
    return torch.equal(tensor.cpu(), torch.full((8,), sum(range(1, run.world.size + 1))))


def _broadcast(run: StageRun) -> bool:
    tensor, source = _own(run), run.world.size - 1
    dist.broadcast(tensor, source)
    return torch.equal(tensor.cpu(), torch.full((8,), source + 1))


def _all_gather(run: StageRun) -> bool:
    gathered = [torch.empty_like(_own(run)) for _ in range(run.world.size)]
    dist.all_gather(gathered, _own(run))
    return all(torch.equal(part.cpu(), torch.full((8,), rank + 1)) for rank, part in enumerate(gathered))


def _all_to_all(run: StageRun) -> bool:
    """Send each rank its number from every rank; checks the received numbers."""
    size = run.world.size
    received = torch.empty(size, dtype=torch.int64, device=run.device.torch_device)
    dist.all_to_all_single(received, torch.full_like(received, run.world.rank))
    return torch.equal(received.cpu(), torch.arange(size))


def _ring(run: StageRun) -> bool:
    """Send from each rank to the next one; checks the received numbers."""
    size, rank = run.world.size, run.world.rank
    if size == 1:
        return True
    received = torch.empty_like(_own(run))
    operations = [
        dist.P2POp(dist.isend, _own(run), (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return torch.equal(received.cpu(), torch.full((8,), (rank - 1) % size + 1))


def _own(run: StageRun) -> Tensor:
    return torch.full((8,), run.world.rank + 1, device=run.device.torch_device)


_COLLECTIVES: dict[str, Callable[[StageRun], bool]] = {
    "all-reduce": _all_reduce,
    "broadcast": _broadcast,
    "all-gather": _all_gather,
    "all-to-all": _all_to_all,
    "sending around a ring": _ring,
}


def device_seconds(work: Callable[[], object], device: Device) -> float:
    """Measure the seconds of one call, including its queued work on the device."""
    device.synchronize()
    start = time.perf_counter()
    work()
    device.synchronize()
    return time.perf_counter() - start


def median_seconds(work: Callable[[], object], device: Device, *, repeats: int = 5, warm_up: int = 1) -> float:
    """Return the median of several calls after warm-up."""
    for _ in range(warm_up):
        work()
    return statistics.median(device_seconds(work, device) for _ in range(repeats))
