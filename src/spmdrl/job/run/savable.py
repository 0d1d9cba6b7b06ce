"""Parts of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from spmdrl.engines.training.checkpoints.file_writes import FileWrites
from spmdrl.resources.rank_sets import RankSet


class Savable(Protocol):
    """A part of a run that is saved and restored."""

    def write_to(self, folder: Path, writes: FileWrites) -> None:
        """Add the writes of this rank's files below `folder`. Collective."""
        ...

    def read_from(self, folder: Path) -> None:
        """Restore the state; may raise any error of a damaged file. Doesn't communicate."""
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
        """Restore all parts."""
        for part in self._parts:
            part.read_from(folder)


class OfMembers:
    """State of the ranks of a set, which write it by collectives of their own."""

    def __init__(self, members: RankSet, part: Savable):
        self._members = members
        self._part = part

    def write_to(self, folder: Path, writes: FileWrites) -> None:
        if self._members.is_member:
            with self._members.alone():
                self._part.write_to(folder, writes)

    def read_from(self, folder: Path) -> None:
        if self._members.is_member:
            self._part.read_from(folder)
