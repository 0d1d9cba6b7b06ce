"""Verdicts of all stages, as JSON and as a Markdown table."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TextIO

from spmdrl.verbs.doctor.stage_run import RankOutcome

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
            cells = (stage.stage, stage.verdict, _figures(stage.figures), stage.reason)
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


def _figures(figures: Mapping[str, Any]) -> str:
    """Return numbers and texts; mappings are for the JSON only."""
    return ", ".join(f"{name} {_shown(value)}" for name, value in figures.items() if not isinstance(value, Mapping))


def _shown(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
