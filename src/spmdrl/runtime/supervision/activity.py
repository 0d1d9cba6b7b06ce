"""This process's activity, for the watching thread: its stage, its progress, and its open rows."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

START, BETWEEN = "start-up", "between stages"


class Activity:
    """Written by working threads, at the cost of an addition, and read by the watching one."""

    def __init__(self) -> None:
        self.stage = START
        self.step = 0
        self.num_steps = 0
        """number of steps begun in this process"""
        self.since = time.monotonic()
        """start time of the stage"""
        self.num_boundaries = 0
        """number of starts and ends of stages so far; ranks pass them in the same order"""
        self.counts: Counter[str] = Counter()
        """finished work, by its name"""
        self.rows: Callable[[], str] | None = None
        """names the rows in progress in this stage"""
        self.calls: Callable[[], str] | None = None
        """names the pending calls"""
        self.on_wedged: Callable[[str], None] | None = None
        """called with the reason if the job is ended while this process waits for calls without results"""

    @property
    def is_warm(self) -> bool:
        """True if a step was done before the present one, so that all is compiled."""
        return self.num_steps > 1

    @property
    def progress(self) -> int:
        """Number that grows with all finished work."""
        return self.num_boundaries + sum(self.counts.copy().values())

    def advance(self, what: str) -> None:
        """Count finished work, such as an engine step."""
        self.counts[what] += 1

    def begin_step(self, step: int) -> None:
        """Assign the time between stages from here on to this step."""
        self.step = step
        self.num_steps += 1

    @contextmanager
    def in_stage(self, name: str, step: int) -> Iterator[None]:
        """Mark the block as a stage; stages may be nested. Its step may be a later one than that under way."""
        before = self.stage, self.step, self.rows
        self._pass(name, step)
        try:
            yield
        finally:
            self._pass(BETWEEN if before[0] == START else before[0], before[1] or step)
            self.rows = before[2]

    def _pass(self, stage: str, step: int) -> None:
        self.stage, self.step, self.since, self.rows = stage, step, time.monotonic(), None
        self.num_boundaries += 1


activity = Activity()
"""activity of this process"""


def first_few(names: list[str], most: int = 8) -> str:
    """Name the first few items, and the number of the rest."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
