"""What a stage is given and what it leaves: figures, faults, goals, or the reason why it can't run here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from spmdrl.resources.device import Device
from spmdrl.resources.world import World

Scale = Literal["full", "small"]
"""full: sizes of an accelerator, for which goals hold; small: those that a CPU has done within seconds."""


class StageSkipped(Exception):
    """A stage can't run here; the message says why."""


@dataclass(frozen=True)
class Goal:
    """The least that a figure should be. Speed below it is shown with its remedy, but fails nothing."""

    figure: str
    least: float
    remedy: str


@dataclass(frozen=True)
class RankOutcome:
    """What one rank found."""

    figures: Mapping[str, Any]
    """numbers and texts; a mapping is for machines only"""
    faults: Sequence[str] = ()
    goals: Sequence[Goal] = ()
    skipped: str | None = None

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> RankOutcome:
        content = json.loads(path.read_text())
        return cls(**(content | {"goals": [Goal(**goal) for goal in content["goals"]]}))


@dataclass
class StageRun:
    """One stage on one rank."""

    kind: str
    """of device"""
    scale: Scale
    num_ranks: int
    folder: Path
    """for temporary files; empty, and removed afterwards"""
    joined: World | None = None
    """of a stage that runs on ranks; a stage that starts jobs is no rank itself"""
    figures: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)

    @property
    def world(self) -> World:
        assert self.joined is not None, "a stage that starts jobs is no rank itself"
        return self.joined

    @property
    def device(self) -> Device:
        return self.world.device

    def require(self, holds: bool, fault: str) -> None:
        """Record a fault unless what it says is wrong holds."""
        if not holds:
            self.faults.append(fault)

    def aim(self, figure: str, least: float, remedy: str) -> None:
        """Set a goal for a figure, at full sizes: small ones are bound by other things than the device's speed."""
        if self.scale == "full":
            self.goals.append(Goal(figure, least, remedy))

    def outcome(self) -> RankOutcome:
        return RankOutcome(self.figures, self.faults, self.goals)
