"""A stage's input, and its outcome: figures, faults, or the reason for skipping it here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from spmdrl.resources.device import Device
from spmdrl.resources.world import World

Scale = Literal["full", "small"]
"""full: sizes of an accelerator; small: sizes that a CPU finishes within seconds"""


class StageSkipped(Exception):
    """A stage can't run here; the message says why."""


@dataclass(frozen=True)
class RankOutcome:
    """Outcome of one rank."""

    figures: Mapping[str, Any]
    """numbers and texts; a mapping is for machines only"""
    faults: Sequence[str] = ()
    skipped: str | None = None

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> RankOutcome:
        return cls(**json.loads(path.read_text()))


@dataclass
class StageRun:
    """One stage on one rank."""

    kind: str
    """kind of device"""
    scale: Scale
    num_ranks: int
    folder: Path
    """for temporary files; empty, and removed afterwards"""
    joined: World | None = None
    """world of a stage that runs on ranks; a stage that starts jobs is no rank itself"""
    figures: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def world(self) -> World:
        assert self.joined is not None, "a stage that starts jobs is no rank itself"
        return self.joined

    @property
    def device(self) -> Device:
        return self.world.device

    def require(self, holds: bool, fault: str) -> None:
        """Record `fault` unless `holds`."""
        if not holds:
            self.faults.append(fault)

    def outcome(self) -> RankOutcome:
        return RankOutcome(self.figures, self.faults)
