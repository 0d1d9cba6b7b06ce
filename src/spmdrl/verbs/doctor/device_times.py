"""Seconds of work on a device, from idle to idle."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from spmdrl.resources.device import Device


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
