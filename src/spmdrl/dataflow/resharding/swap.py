"""Swap of groups of tensors to the host and back, with their device storage really freed in between.

It moves *storages*, each once: FSDP2's local shards are padded views of larger ones, and other views share them. A
tensor keeps its identity, so modules, optimizers and DTensors stay valid, but must not be touched while it is out.

    device -> leaving -> host -> returning -> device
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from spmdrl.dataflow.resharding.swap_space import CopyTimes, FileStore, HostStore, NoStore, ReturnTicket, Span, Ticket
from spmdrl.resources.device import Device
from spmdrl.resources.memory import MemoryLedger, Owner


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
        on_device, slab_start = torch.empty(0, dtype=torch.uint8, device=span.storage.device).set_(span.storage), 0
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


TensorsByName = Callable[[], Mapping[str, Tensor]]
MakeStore = Callable[[Device, Path], HostStore]
_ALIGNMENT = 512


def make_host_store(device: Device, directory: Path) -> HostStore:
    return FileStore(directory) if device.is_cpu else PinnedStore(device)


@dataclass(frozen=True)
class Returned:
    """A group that has returned."""

    num_bytes: int
    copied: CopyTimes


@dataclass(frozen=True)
class Left:
    """A group that has left the device, except for staying tensors."""

    freed_bytes: int
    copied_bytes: int
    """Bytes that the host had no copy of yet."""


@dataclass
class _Group:
    """One owner's tensors, and the place of their storages."""

    owner: Owner
    tensors: TensorsByName
    store: HostStore
    state: Literal["device", "leaving", "host", "returning"] = "device"
    spans: list[Span] = field(default_factory=list)
    """storages while the group isn't wholly on the device; dropped then, as their owner may replace them"""
    returning: ReturnTicket | None = None
    staying_bytes: int = 0
    """bytes of tensors that stay on the device while the others are out"""
    copied_version: int | None = None
    copied_storages: list[tuple[int, int]] = field(default_factory=list)
    """(address, bytes) of storages whose current content the host has"""


class Swap:
    """Named groups of tensors that leave the device together and come back together."""

    def __init__(
        self, device: Device, ledger: MemoryLedger, directory: Path, *, make_store: MakeStore = make_host_store
    ):
        """`directory` takes the unlinked temporary files of a CPU's host side; accelerators don't use it."""
        self._device = device
        self._ledger = ledger
        self._directory = directory
        self._make_store = make_store
        self._groups: dict[str, _Group] = {}

    def add_group(self, owner: Owner, tensors: TensorsByName) -> None:
        """Add a group; `tensors` is called at each leaving, since optimizer state appears only with the first step."""
        assert owner not in self._groups, owner
        self._groups[owner] = _Group(owner, tensors, self._make_store(self._device, self._directory))
        self.account(owner)

    def account(self, owner: Owner) -> None:
        """Enter the group's present device bytes into the ledger."""
        group = self._groups[owner]
        assert group.state == "device", (owner, group.state)
        held = (tensor for tensor in group.tensors().values() if _occupies(tensor, self._device))
        self._ledger.set(owner, "device", storage_bytes(held))

    def is_on_device(self, owner: Owner) -> bool:
        return self._groups[owner].state == "device"

    def leave(self, owner: Owner, *, version: int | None = None, staying: Iterable[str] = ()) -> Leaving:
        """Start moving a group out, part by part, but for the tensors that are `staying`, by name.

        With the `version` of the last leaving the host's copy is still valid, and storage is only freed. Raises
        RuntimeError unless the group is on the device, OSError if the host has no room; then nothing was freed.
        """
        group = self._groups[owner]
        if group.state != "device":
            raise RuntimeError(f"{owner} can't leave the device: its state is {group.state!r}; finish its return first")
        tensors = {name: tensor for name, tensor in group.tensors().items() if _occupies(tensor, self._device)}
        going = self._going(tensors, staying)
        group.staying_bytes = storage_bytes(tensor for name, tensor in tensors.items() if name not in going)
        return Leaving(group, going, self._ledger, version)

    def to_host(self, owner: Owner, *, version: int | None = None) -> Left:
        """Move a whole group out; see `leave`."""
        return self.leave(owner, version=version).finish()

    def start_return(self, owner: Owner) -> None:
        """Start bringing a group back in the background."""
        group = self._groups[owner]
        if group.state != "host":
            raise RuntimeError(f"{owner} can't return: it is in state {group.state!r}; move it to the host first")
        group.state = "returning"
        group.returning = group.store.read(group.spans)
        # From here on all of it may be on the device.
        self._ledger.set(owner, "device", group.staying_bytes + sum(span.num_bytes for span in group.spans))

    def finish_return(self, owner: Owner) -> Returned:
        """Wait until a group is back."""
        group = self._groups[owner]
        if group.returning is None:
            raise RuntimeError(f"{owner} isn't returning: it is in state {group.state!r}; call start_return first")
        ticket, group.returning = group.returning, None
        ticket.wait()
        group.copied_storages = _addresses(group.spans)
        group.spans, group.state, group.staying_bytes = [], "device", 0
        return Returned(sum(num_bytes for _, num_bytes in group.copied_storages), ticket.times())

    def close(self) -> None:
        """Wait for returns under way, and drop the host copies."""
        for group in self._groups.values():
            if group.returning is not None:
                self.finish_return(group.owner)
            group.store.close()
            self._ledger.set(group.owner, "host", 0)

    def _going(self, tensors: Mapping[str, Tensor], staying: Iterable[str]) -> Mapping[str, Tensor]:
        """Return the tensors that share no storage with a staying one."""
        kept = {tensors[name].untyped_storage().data_ptr() for name in staying if name in tensors}
        return {name: tensor for name, tensor in tensors.items() if tensor.untyped_storage().data_ptr() not in kept}


class StayingSwap(Swap):
    """Swap with the same states and refusals that moves nothing: every tensor stays in place."""

    def __init__(self, device: Device, ledger: MemoryLedger):
        super().__init__(device, ledger, Path(), make_store=lambda device, directory: NoStore())

    def _going(self, tensors: Mapping[str, Tensor], staying: Iterable[str]) -> Mapping[str, Tensor]:
        return {}


class Leaving:
    """A group on its way out, part by part; a storage leaves with the last tensor that uses it."""

    def __init__(self, group: _Group, tensors: Mapping[str, Tensor], ledger: MemoryLedger, version: int | None):
        self._group = group
        self._ledger = ledger
        self._version = version
        spans = _spans_of(tensors)
        same_storages = group.copied_storages == _addresses(spans)
        self._is_copied = version is not None and version == group.copied_version and same_storages
        if not self._is_copied:
            num_bytes = spans[-1].offset + spans[-1].num_bytes if spans else 0
            group.store.reserve(num_bytes)
            group.copied_version = None
            ledger.set(group.owner, "host", num_bytes)
        group.spans, group.state = spans, "leaving"
        # Tensors of one storage share the set of names among them that haven't moved yet.
        shared: dict[int, tuple[Span, set[str]]] = {span.storage.data_ptr(): (span, set()) for span in spans}
        self._waiting = {name: shared[tensor.untyped_storage().data_ptr()] for name, tensor in tensors.items()}
        for name, (_, users) in self._waiting.items():
            users.add(name)
        self._copying: list[tuple[Ticket, list[Span]]] = []

    def move(self, names: Iterable[str]) -> None:
        """Move tensors out; at most one part is still being copied when this returns."""
        ready = [span for span in map(self._span_without, names) if span is not None]
        self._free_copied(wait=True)
        if self._is_copied:
            _free(ready)
        elif ready:
            self._copying.append((self._write(ready), ready))
        self._free_copied(wait=False)

    def finish(self) -> Left:
        """Move what is left and waits for all copies."""
        self.move(list(self._waiting))
        self._free_copied(wait=True)
        self._group.state, self._group.copied_version = "host", self._version
        freed = sum(span.num_bytes for span in self._group.spans)
        return Left(freed, copied_bytes=0 if self._is_copied else freed)

    def _span_without(self, name: str) -> Span | None:
        """Return the span that can go once `name` needs it no more; None while others do, or where it isn't waiting."""
        if name not in self._waiting:
            return None
        span, users = self._waiting.pop(name)
        users.discard(name)
        return None if users else span

    def _write(self, spans: list[Span]) -> Ticket:
        try:
            return self._group.store.write(spans)
        except OSError:
            self._bring_back()
            raise

    def _bring_back(self) -> None:
        """Restore everything on the device after a failed copy."""
        self._free_copied(wait=True)
        spans, self._group.spans = self._group.spans, []
        self._group.store.read([span for span in spans if span.storage.nbytes() != span.num_bytes]).wait()
        held = self._group.staying_bytes + sum(span.num_bytes for span in spans)
        self._ledger.set(self._group.owner, "device", held)
        self._group.state, self._group.staying_bytes = "device", 0

    def _free_copied(self, *, wait: bool) -> None:
        while self._copying and (wait or self._copying[0][0].is_done()):
            ticket, spans = self._copying.pop(0)
            ticket.wait()
            _free(spans)
        on_device = sum(span.storage.nbytes() for span in self._group.spans)
        self._ledger.set(self._group.owner, "device", self._group.staying_bytes + on_device)


def _occupies(tensor: Tensor, device: Device) -> bool:
    """Return True if a tensor has storage on the device; an optimizer keeps some scalars on the host."""
    return tensor.is_cpu == device.is_cpu and tensor.untyped_storage().nbytes() > 0


def _spans_of(tensors: Mapping[str, Tensor]) -> list[Span]:
    """Return a span per distinct storage, side by side in the order of the tensors."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors.values()}
    spans, offset = [], 0
    for storage in storages.values():
        if not storage.resizable():
            raise RuntimeError(
                f"a storage of {storage.nbytes()} bytes can't be freed in place: it comes from numpy or a "
                "file, or was lent to numpy; clone the tensor before that, or before training"
            )
        spans.append(Span(storage, offset, storage.nbytes()))
        offset += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
    return spans


def _addresses(spans: list[Span]) -> list[tuple[int, int]]:
    return [(span.storage.data_ptr(), span.num_bytes) for span in spans]


def _free(spans: list[Span]) -> None:
    for span in spans:
        span.storage.resize_(0)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages under these tensors."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
