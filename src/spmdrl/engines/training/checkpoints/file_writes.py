"""Who carries out the writes of a checkpoint: at once, or later, from copies of what must be in it."""

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
# Of what is free when the first snapshot begins; the rest is for what comes later, such as the files' pages.
_MOST_OF_FREE = 0.7
_SLAB_BYTES = 64 << 20
# More than any dtype or copy needs.
_ALIGNMENT = 64


class FileWrites(Protocol):
    """Takes what a part of a run has to write, in the order in which it is written."""

    def add(self, write: Callable[[], Iterable[Path]]) -> None:
        """Have files written, now or later, by a function that returns their paths and communicates nothing."""

    def follow(self, write: Callable[[], Iterable[Path]]) -> bool:
        """Have the main rank write files once those of all ranks are there, from which it may read; False where nothing
        can follow. All ranks get the same answer."""
        ...

    def held(self, tensor: Tensor) -> Tensor:
        """What a function that is added may read in place of a tensor that changes: itself, or a copy on the host."""
        ...

    def held_weights(self, weights: Weights) -> Weights:
        """The same for weights of which each is good until the next one. Collective where they are gathered."""
        ...


class WritesAtOnce:
    """Carries out each write as it is added, without copies."""

    def __init__(self) -> None:
        self.paths: list[Path] = []
        """the files that were written"""

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
    """Write a part's files below `folder` and return their paths. Collective where the part's gathers are."""
    writes = WritesAtOnce()
    part.write_to(folder, writes)
    return writes.paths


def add_text(writes: FileWrites, path: Path, content: str) -> None:
    """Have a text written."""

    def write() -> list[Path]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
        return [path]

    writes.add(write)


class NoHostMemory(MemoryError):
    """The host hasn't the memory for copies of a checkpoint."""


class HostCopies:
    """Memory for one snapshot at a time, kept for the next one: fresh pages would take longer than the copies."""

    def __init__(self, device: Device, *, num_ranks: int):
        """`device` is where the tensors are, `num_ranks` how many ranks share the host."""
        self.device = device
        self.num_ranks = num_ranks
        self._slabs: list[Tensor] = []
        self._room: int | None = None
        self._next = (0, 0)

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._slabs))

    def reuse(self) -> None:
        """Give the same memory out again; what was there is over."""
        self._next = (0, 0)

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy in this memory, complete once the tensor's device has come to it.

        Raises NoHostMemory where it would take more than the host can spare.
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
                f"{self.num_bytes + num_bytes} bytes of copies are needed, and the host has "
                f"{self.num_bytes + self._room} to spare for this rank"
            )
        self._room -= num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=not self.device.is_cpu)


class Snapshot:
    """Collects the writes of a checkpoint, with copies of the tensors that they read."""

    def __init__(self, copies: HostCopies):
        """What an earlier snapshot holds in `copies` is over."""
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
        """Wait until all copies are there: from here on what was copied may change."""
        self._copies.device.synchronize()

    def write(self) -> list[Path]:
        """Carry out the writes in their order; returns the files."""
        return [path for write in self._writes for path in write()]

    def write_following(self) -> list[Path]:
        """On the main rank, carry out what follows the writes of all ranks; returns the files."""
        return [path for write in self._following for path in write()]
