"""Execution of a checkpoint's writes: at once, or later from copies of the content."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from spmdrl.resources.device import Device
from spmdrl.resources.host_memory import free_host_bytes

Weights = Iterable[tuple[str, Tensor]]
# Share of the memory free at the first snapshot; the rest is for later needs, such as the files' pages.
_MOST_OF_FREE = 0.7
_SLAB_BYTES = 64 << 20
# More than any dtype or copy needs.
_ALIGNMENT = 64


class FileWrites(Protocol):
    """Receiver of the writes of a part of a run, in order."""

    def add(self, write: Callable[[], Iterable[Path]]) -> None:
        """Execute, now or later, a function that writes files and returns their paths; it must not communicate."""

    def follow(self, write: Callable[[], Iterable[Path]]) -> bool:
        """Let the main rank write files once those of all ranks are there, from which it may read; returns False, on
        all ranks, if nothing can follow."""
        ...

    def held(self, tensor: Tensor) -> Tensor:
        """Return a changing tensor as an added function may read it: itself, or a copy on the host."""
        ...

    def held_weights(self, weights: Weights) -> Weights:
        """Return weights, each valid until the next one, held like tensors. Collective if they are gathered."""
        ...


class WritesAtOnce:
    """Writes executed as they are added, without copies."""

    def __init__(self) -> None:
        self.paths: list[Path] = []
        """written files"""

    def add(self, write: Callable[[], Iterable[Path]]) -> None:
        self.paths += write()

    def follow(self, write: Callable[[], Iterable[Path]]) -> bool:
        return False

    def held(self, tensor: Tensor) -> Tensor:
        return tensor

    def held_weights(self, weights: Weights) -> Weights:
        return weights


class WritesItsFiles(Protocol):
    """A part of a run that adds the writes of its files below a folder."""

    def write_to(self, folder: Path, writes: FileWrites, /) -> None: ...


def written_at_once(part: WritesItsFiles, folder: Path) -> list[Path]:
    """Write a part's files below `folder` and return their paths. Collective if the part's gathers are."""
    writes = WritesAtOnce()
    part.write_to(folder, writes)
    return writes.paths


def add_text(writes: FileWrites, path: Path, content: str) -> None:
    """Add the write of a text."""

    def write() -> list[Path]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
        return [path]

    writes.add(write)


class NoHostMemory(MemoryError):
    """Raised if the host lacks memory for copies of a checkpoint."""


class HostCopies:
    """Memory of one snapshot at a time, reused for the next: fresh pages would take longer than the copies."""

    def __init__(self, device: Device, *, num_ranks: int):
        """`device` holds the tensors; `num_ranks` ranks share the host."""
        self.device = device
        self.num_ranks = num_ranks
        self._slabs: list[Tensor] = []
        self._room: int | None = None
        self._next = (0, 0)

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._slabs))

    def reuse(self) -> None:
        """Reuse the same memory; its content is lost."""
        self._next = (0, 0)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy in this memory, complete once the tensor's device has reached it.

        Raises NoHostMemory if it would take more than the host can spare.
        """
        memory = self._take(tensor.numel() * tensor.element_size())
        copy = memory.view(tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor.detach(), non_blocking=not self.device.is_cpu)

    def _take(self, num_bytes: int) -> Tensor:
        number, start = self._next
        while number < len(self._slabs) and start + num_bytes > len(self._slabs[number]):
            number, start = number + 1, 0
        if number == len(self._slabs):
            self._slabs.append(self._allocate(max(num_bytes, _SLAB_BYTES)))
        self._next = number, start + math.ceil(num_bytes / _ALIGNMENT) * _ALIGNMENT
        return self._slabs[number][start : start + num_bytes]

    def _allocate(self, num_bytes: int) -> Tensor:
        if self._room is None:
            self._room = int(free_host_bytes() * _MOST_OF_FREE / self.num_ranks)
        if num_bytes > self._room:
            raise NoHostMemory(
                f"{self.num_bytes + num_bytes} bytes of copies are needed, but the host has "
                f"{self.num_bytes + self._room} to spare for this rank"
            )
        self._room -= num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=not self.device.is_cpu)


class Snapshot:
    """Collection of a checkpoint's writes, with copies of the tensors that they read."""

    def __init__(self, copies: HostCopies):
        """Overwrite earlier snapshots in `copies`."""
        copies.reuse()
        self._copies = copies
        self._writes: list[Callable[[], Iterable[Path]]] = []
        self._following: list[Callable[[], Iterable[Path]]] = []

    def add(self, write: Callable[[], Iterable[Path]]) -> None:
        self._writes.append(write)

    def follow(self, write: Callable[[], Iterable[Path]]) -> bool:
        self._following.append(write)
        return True

    def held(self, tensor: Tensor) -> Tensor:
        return self._copies.copy(tensor)

    def held_weights(self, weights: Weights) -> Weights:
        return [(name, self.held(weight)) for name, weight in weights]

    def complete(self) -> None:
        """Wait for all copies: afterwards the copied tensors may change."""
        self._copies.device.synchronize()

    def write(self) -> list[Path]:
        """Execute the writes in order; returns the files."""
        return [path for write in self._writes for path in write()]

    def write_following(self) -> list[Path]:
        """On the main rank, execute the writes that follow those of all ranks; returns the files."""
        return [path for write in self._following for path in write()]
