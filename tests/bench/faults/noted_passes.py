"""Ranks that note, as they pass them, where stages begin and end, and fault points: a killed one's last place too."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from spmdrl.observability import fault_points
from spmdrl.runtime.supervision.activity import START, Activity, activity

PUSH = "weight push"
"""the part of the stage `resharding` that sends weights; the switch back is `resharding`"""


@dataclass(frozen=True)
class Pass:
    """A place that a rank passed."""

    seconds: float
    """by a clock that all processes of a machine share"""
    in_step: int
    """the run's step; 0 before the first one"""
    point: str
    """fault point; empty where a stage begins or ends"""
    step: int
    """step of the stage, a later one than the run's for what is generated ahead"""
    stage: str
    """the stage from there on"""


NOWHERE = Pass(0.0, 0, "", 0, START)


class _Noting(Activity):
    """Appends each pass to a file at once, so that SIGKILL loses none."""

    file = -1
    in_step = 0

    def note(self, point: str, *values: object) -> None:
        if point == "step" and isinstance(values[0], int):
            self.in_step = values[0]
        stage = PUSH if self.stage == "resharding" and _is_called_by("to_generation") else self.stage
        line = f"{time.monotonic()}\t{self.in_step}\t{point}\t{self.step}\t{stage}\n"
        os.write(self.file, line.encode())

    def _pass(self, stage: str, step: int) -> None:
        super()._pass(stage, step)
        self.note("")


def _is_called_by(name: str) -> bool:
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_name != name:
        frame = frame.f_back
    return frame.f_code.co_name == name


def note_passes(folder: Path) -> None:
    """Have this process, a rank, note its passes in a file of the folder from here on."""
    folder.mkdir(exist_ok=True)
    _Noting.file = os.open(folder / os.environ.get("RANK", "0"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    activity.__class__ = _Noting
    assert isinstance(activity, _Noting)
    fault_points.hook = activity.note


class Passes:
    """What a rank notes, to be read while it does."""

    def __init__(self, folder: Path, rank: int):
        self._path = folder / str(rank)
        self._offset = 0

    def new(self) -> list[Pass]:
        """What was noted since the last call."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            content = file.read()
        # A line may be only partly written.
        content = content[: content.rfind(b"\n") + 1]
        self._offset += len(content)
        return [_pass_of(line) for line in content.decode().splitlines()]


def _pass_of(line: str) -> Pass:
    seconds, in_step, point, step, stage = line.split("\t")
    return Pass(float(seconds), int(in_step), point, int(step), stage)
