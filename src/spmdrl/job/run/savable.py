"""What a checkpoint is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from spmdrl.engines.training.checkpoints.file_writes import FileWrites


class Savable(Protocol):
    """A part of a run that is written down and taken back."""

    def write_to(self, folder: Path, writes: FileWrites) -> None:
        """Add the writes of this rank's files below `folder`. Collective."""
        ...

    def read_from(self, folder: Path) -> None:
        """Take the state back, or raise whatever a damaged file makes fail. Nothing is communicated."""
        ...


class SavedParts:
    """Several parts in one checkpoint."""

    def __init__(self, *parts: Savable):
        self._parts = parts

    def write_to(self, folder: Path, writes: FileWrites) -> None:
        """Add the writes of this rank's files of all parts. Collective."""
        for part in self._parts:
            part.write_to(folder, writes)

    def read_from(self, folder: Path) -> None:
        """Take all parts back."""
        for part in self._parts:
            part.read_from(folder)
