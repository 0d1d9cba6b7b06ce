"""The host side beside an accelerator: pinned memory, copied to and from in the background."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from spmdrl.dataflow.resharding.swapping.swap_space import CopyTimes, ReturnTicket, Span, Ticket
from spmdrl.resources.device import Device


class PinnedStore:
    """One pinned buffer, copied to and from on a side stream of its own."""

    def __init__(self, device: Device):
        self._device = device
        self._stream = device.module.Stream()
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def reserve(self, num_bytes: int) -> None:
        if self._pinned.numel() < num_bytes:
            # A copy still reading the old buffer would otherwise lose it.
            self._stream.synchronize()
            self._pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def write(self, spans: Sequence[Span]) -> Ticket:
        return self._copy(spans, returning=False)

    def read(self, spans: Sequence[Span]) -> ReturnTicket:
        for span in spans:
            span.storage.resize_(span.num_bytes)
        return self._copy(spans, returning=True)

    def close(self) -> None:
        self._stream.synchronize()
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def _copy(self, spans: Sequence[Span], *, returning: bool) -> ReturnTicket:
        module = self._device.module
        # Kernels queued so far may still write these weights, or use the memory that the allocator just handed out.
        self._stream.wait_stream(module.current_stream())
        with module.stream(self._stream):
            begun, copied = module.Event(enable_timing=True), module.Event(enable_timing=True)
            begun.record(self._stream)
            for span in spans:
                on_host = self._pinned[span.offset : span.offset + span.num_bytes]
                on_device = _bytes_tensor(span.storage)
                to, source = (on_device, on_host) if returning else (on_host, on_device)
                to.copy_(source, non_blocking=True)
            copied.record(self._stream)
        return _EventTicket(self._device, begun, copied)


class _EventTicket:
    def __init__(self, device: Device, begun: torch.Event, copied: torch.Event):
        self._device = device
        self._begun = begun
        self._copied = copied
        self._queued = time.perf_counter()

    def is_done(self) -> bool:
        return self._copied.query()

    def wait(self) -> None:
        # Ordering the device is enough: who takes the freed memory, or reads what came back, is queued behind this.
        self._device.module.current_stream().wait_event(self._copied)

    def times(self) -> CopyTimes:
        self._copied.synchronize()
        # The device measures durations only; a return is queued when nothing else is.
        return CopyTimes(self._queued, self._queued + self._begun.elapsed_time(self._copied) / 1e3)


def _bytes_tensor(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
