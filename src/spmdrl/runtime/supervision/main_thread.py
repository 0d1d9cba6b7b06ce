"""Place of a rank's main thread, for reports and for samples of work and waiting."""

from __future__ import annotations

import gc
import linecache
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

import spmdrl
from spmdrl.runtime.supervision.activity import activity
from spmdrl.runtime.supervision.agent import Duty, agent
from spmdrl.runtime.supervision.board import RankState

assert spmdrl.__file__ is not None
_PACKAGE = Path(spmdrl.__file__).parent
# Every function in them waits for other ranks.
_WAITING_FILES = ("resources/collectives.py", "parallel/axis_collectives.py", "transport/exchange.py")
_TORCHS = "torch/distributed/"
# Wrappers of PyTorch's own.
_DECORATORS = ("torch/distributed/c10d_logger.py",)
_DEBUGGERS = ("pdb.py", "bdb.py")
# A large file or a compilation takes long, and nothing is counted meanwhile.
_LONG_STAGES = ("checkpoint", "keep_rollouts")
_PATIENCE = 3.0
_LOOK_SECONDS = 0.05
# Share of observations in earlier steps, in which a short stage may have passed unseen.
_KEPT = 0.7


def state_of_this(rank: int, idle_seconds: float, host: str = "", rank_set: int = 0) -> RankState:
    """Return this rank's state, from its counters and the stack of its main thread."""
    stack = list(_main_frames())
    collective = _collective_of(stack)
    counts = [f"{count} {what}" for what, count in sorted(activity.counts.copy().items())]
    described = [describe() for describe in (activity.calls, activity.rows) if describe is not None]
    doing = [f"at {_place_of(stack)}", *filter(None, described), *counts]
    is_long = activity.stage in _LONG_STAGES or not activity.is_warm
    return RankState(
        rank, activity.stage, activity.step, activity.num_boundaries, idle_seconds, collective, ", ".join(doing),
        _PATIENCE if is_long else 1.0, host, rank_set,
    )  # fmt: skip


def waits_for_others() -> bool:
    """Return True if the main thread is inside a collective; cheap enough for frequent sampling."""
    return bool(_collective_of(_main_frames()))


def is_debugged() -> bool:
    """Return True if a debugger has stopped the main thread."""
    return any(frame.f_code.co_filename.endswith(_DEBUGGERS) for frame in _main_frames())


def _main_frames() -> Iterator[FrameType]:
    # Up to Python 3.11, making a frame's object may collect garbage. A finalizer may then let the main thread leave
    # that frame, to whose memory the object would still point.
    collects = gc.isenabled()
    gc.disable()
    try:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None:
            yield frame
            frame = frame.f_back
    finally:
        if collects:
            gc.enable()


def _collective_of(stack: Iterable[FrameType]) -> str:
    """Return the collective that these frames are inside of, or an empty text."""
    found = ""
    for number, frame in enumerate(stack):
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if path.endswith(_DECORATORS):
            continue
        if _only_waits(path):
            found = name
        # A thread that runs may be between two lines.
        elif number == 0 and (frame.f_lineno or 0) in _waiting_lines(path):
            found = "wait"
        elif _is_own(path):
            break
    return found


@cache
def _only_waits(path: str) -> bool:
    return _TORCHS in path or path.endswith(_WAITING_FILES)


@cache
def _is_own(path: str) -> bool:
    """Return True for a file of this package."""
    return _PACKAGE in Path(path).parents


@cache
def _waiting_lines(path: str) -> frozenset[int]:
    """Return the line numbers that end with a wait. The file's text isn't kept, since memory would grow by file."""
    lines = linecache.getlines(path)
    linecache.cache.pop(path, None)
    return frozenset(number for number, line in enumerate(lines, 1) if line.rstrip().endswith(".wait()"))


def _place_of(stack: Sequence[FrameType]) -> str:
    """Return the innermost line of this package outside of files that only wait; else the innermost of all."""
    own = [frame for frame in stack if _is_own(frame.f_code.co_filename)]
    callers = [frame for frame in own if not frame.f_code.co_filename.endswith(_WAITING_FILES)] or own or stack
    if not callers:
        return "an unknown place"
    path = Path(callers[0].f_code.co_filename)
    shown = path.relative_to(_PACKAGE.parent) if _PACKAGE in path.parents else path
    return f"{shown}:{callers[0].f_lineno}"


@dataclass
class _Seen:
    """Number of samples of the main thread in a stage, and of those in which it worked."""

    num_looks: float = 0.0
    num_working: float = 0.0


class WorkSampler:
    """Sampler of this process's main thread, some times a second, by the agent.

    A device's waiting inside a pass counts as work: there, waiting ranks look as busy as working ones.
    """

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def running(self) -> AbstractContextManager[None]:
        """Sample within the block."""
        return agent.doing(Duty(self._look, _LOOK_SECONDS))

    def working_seconds(self, stage_seconds: Mapping[str, float]) -> dict[str, float]:
        """Return the part of each stage's seconds in which this rank worked; called once per step."""
        working = {}
        for stage, seconds in stage_seconds.items():
            seen = self._seen.get(stage, _Seen())
            working[stage] = seconds * (seen.num_working / seen.num_looks if seen.num_looks >= 1.0 else 1.0)
        for stage, seen in list(self._seen.items()):
            self._seen[stage] = _Seen(_KEPT * seen.num_looks, _KEPT * seen.num_working)
        return working

    def _look(self) -> None:
        seen = self._seen.setdefault(activity.stage, _Seen())
        seen.num_looks += 1
        seen.num_working += not waits_for_others()


work_sampler = WorkSampler()
"""sampler of this process"""
