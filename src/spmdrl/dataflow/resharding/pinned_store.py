"""The host side beside an accelerator: pinned memory, copied to and from in the background."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator, Sequence

import torch

from spmdrl.dataflow.resharding.swap_space import CopyTimes, ReturnTicket, Span, Ticket
from spmdrl.resources.device import Device


class PinnedStore:
    """Pinned slabs, copied to and from on this store's own side stream.

    PyTorch rounds the size of pinned memory up to a power of two, which would nearly double one large buffer. Each slab
    is a power of two itself, so that at most the last one is larger than needed.
    """

    def __init__(self, device: Device, *, slab_bytes: int = 1 << 30):
        """`slab_bytes`, the size of the largest slabs, is a power of two."""
        self._device = device
        self._slab_bytes = slab_bytes
        self._stream = device.module.Stream()
        self._slabs: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._slabs))

    def reserve(self, num_bytes: int) -> None:
        try:
            while (missing := num_bytes - self.num_bytes) > 0:
                size = min(self._slab_bytes, 1 << (missing - 1).bit_length())
                self._slabs.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))
        except RuntimeError as error:
            raise OSError(
                errno.ENOMEM,
                f"no pinned host memory for {num_bytes} bytes of swapped training state beyond {self.num_bytes} "
                f"({str(error).splitlines()[0]}); start fewer ranks per node, shard the state over more "
                "(resources.update.shard), or set reshard.swap to never where the device's memory allows it",
            ) from error

    def write(self, spans: Sequence[Span]) -> Ticket:
        return self._copy(spans, returning=False)

    def read(self, spans: Sequence[Span]) -> ReturnTicket:
        for span in spans:
            span.storage.resize_(span.num_bytes)
        return self._copy(spans, returning=True)

    def close(self) -> None:
        self._stream.synchronize()
        self._slabs.clear()

    def _copy(self, spans: Sequence[Span], *, returning: bool) -> ReturnTicket:
        module = self._device.module
        # Queued kernels may still write these weights, or use memory that the allocator just handed out.
        self._stream.wait_stream(module.current_stream())
        with module.stream(self._stream):
            begun, copied = module.Event(enable_timing=True), module.Event(enable_timing=True)
            begun.record(self._stream)
            for span in spans:
                for on_device, on_host in self._parts(span):
                    to, source = (on_device, on_host) if returning else (on_host, on_device)
                    to.copy_(source, non_blocking=True)
            copied.record(self._stream)
        return _EventTicket(self._device, begun, copied)

    def _parts(self, span: Span) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the bytes of a span, cut where slabs end, each with its place on the host."""
        on_device, slab_start = _bytes_tensor(span.storage), 0
        for slab in self._slabs:
            start, stop = max(span.offset, slab_start), min(span.offset + span.num_bytes, slab_start + len(slab))
            if start < stop:
                yield on_device[start - span.offset : stop - span.offset], slab[start - slab_start : stop - slab_start]
            slab_start += len(slab)


class _EventTicket:
    def __init__(self, device: Device, begun: torch.Event, copied: torch.Event):
        self._device = device
        self._begun = begun
        self._copied = copied
        self._queued = time.perf_counter()

    def is_done(self) -> bool:
        return self._copied.query()

    def wait(self) -> None:
        # Ordering the device is enough: users of the freed memory or the returned bytes are queued behind this.
        self._device.module.current_stream().wait_event(self._copied)

    def times(self) -> CopyTimes:
        self._copied.synchronize()
        # The device measures only durations; a return is queued when nothing else is.
        return CopyTimes(self._queued, self._queued + self._begun.elapsed_time(self._copied) / 1e3)


def _bytes_tensor(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
