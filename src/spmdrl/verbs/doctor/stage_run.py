"""A stage's input, and its outcome: figures, faults, or the reason for skipping it here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

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


Verdict = Literal["passed", "failed", "skipped"]
_RATES = re.compile("per_second$|share_of_")


@dataclass(frozen=True)
class StageVerdict:
    """Result of one stage."""

    stage: str
    verdict: Verdict
    reason: str = ""
    """reason for failing or skipping it"""
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckReport:
    """Results of the whole check on one device."""

    device: Mapping[str, Any]
    stages: Sequence[StageVerdict]
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """True if no stage failed."""
        return all(stage.verdict != "failed" for stage in self.stages)

    def to_json(self) -> str:
        return json.dumps({"device": self.device, "stages": [asdict(stage) for stage in self.stages]}, indent=1) + "\n"

    def to_markdown(self) -> str:
        lines = [", ".join(f"{name} {value}" for name, value in self.device.items()), ""]
        lines += ["| stage | verdict | figures | remark |", "| -- | -- | -- | -- |"]
        for stage in self.stages:
            # Mappings are for the JSON only.
            figures = [f"{name} {_shown(one)}" for name, one in stage.figures.items() if not isinstance(one, Mapping)]
            cells = (stage.stage, stage.verdict, ", ".join(figures), stage.reason)
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        return "\n".join([*lines, "", *self.notes]) + "\n"

    def print(self, stream: TextIO) -> None:
        stream.write(self.to_markdown())


def verdict_of(stage: str, ranks: Sequence[RankOutcome], *, crash: str | None, seconds: float) -> StageVerdict:
    """Return the verdict on the ranks' outcomes, in rank order; `crash` describes the end of processes that crashed."""
    skipped = next((rank.skipped for rank in ranks if rank.skipped), None)
    if skipped and crash is None:
        return StageVerdict(stage, "skipped", skipped)
    faults = [
        f"rank {number}: {fault}" if len(ranks) > 1 else fault
        for number, rank in enumerate(ranks)
        for fault in rank.faults
    ]
    if crash is not None and not faults:
        faults.append(crash)
    figures = _joined(ranks) | {"seconds": round(seconds, 1)}
    if faults:
        return StageVerdict(stage, "failed", "; ".join(faults), figures)
    return StageVerdict(stage, "passed", "", figures)


def _joined(ranks: Sequence[RankOutcome]) -> dict[str, Any]:
    """Return the first rank's figures, but rates of the slowest rank, which exposes a slow device or link."""
    if not ranks:
        return {}
    slowest = {
        name: min(rank.figures[name] for rank in ranks if name in rank.figures)
        for name in ranks[0].figures
        if _RATES.search(name)
    }
    return {**ranks[0].figures, **slowest}


def _shown(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
