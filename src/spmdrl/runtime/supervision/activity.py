"""What this process is doing, for the thread that watches it: its stage, how far it is, and which rows are open."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

START, BETWEEN = "start-up", "between stages"


class Activity:
    """Written by the threads that work, at the cost of an addition, and read by one that watches."""

    def __init__(self) -> None:
        self.stage = START
        self.step = 0
        self.first_step = 0
        """the one that this process began with; 0 before it"""
        self.since = time.monotonic()
        """when the stage began"""
        self.num_boundaries = 0
        """beginnings and ends of stages so far; ranks pass them in the same order"""
        self.counts: Counter[str] = Counter()
        """what was done, by its name"""
        self.rows: Callable[[], str] | None = None
        """names the rows that are under way in this stage"""
        self.calls: Callable[[], str] | None = None
        """names the calls that are waited for now"""
        self.on_wedged: Callable[[str], None] | None = None
        """called with the reason, where the job is ended while this process waits for calls that get no answer"""

    @property
    def is_warm(self) -> bool:
        """Whether a step was done before the present one, so that all is compiled."""
        return self.step > self.first_step

    @property
    def progress(self) -> int:
        """A number that grows with all that is done."""
        return self.num_boundaries + sum(self.counts.copy().values())

    def advance(self, what: str) -> None:
        """Count something that was done, such as an engine step."""
        self.counts[what] += 1

    def begin_step(self, step: int) -> None:
        """What comes between stages from here on belongs to this step."""
        self.step = step
        self.first_step = self.first_step or step

    @contextmanager
    def in_stage(self, name: str, step: int) -> Iterator[None]:
        """Return the block is a stage, inside which others may be."""
        before = self.stage, self.step, self.rows
        self._pass(name, step)
        try:
            yield
        finally:
            self._pass(BETWEEN if before[0] == START else before[0], max(before[1], step))
            self.rows = before[2]

    def _pass(self, stage: str, step: int) -> None:
        self.stage, self.step, self.since, self.rows = stage, step, time.monotonic(), None
        self.first_step = self.first_step or step
        self.num_boundaries += 1


activity = Activity()
"""that of this process"""


def first_few(names: list[str], most: int = 8) -> str:
    """Return the first names, and how many more there are."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
