"""Who carries out the writes of a checkpoint: at once, or later, from copies of what must be in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from torch import Tensor

Weights = Iterable[tuple[str, Tensor]]


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
