"""Calls that cost a worker, counted by what they were about: two, and its further calls are refused."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

MOST_STRIKES = 2


@dataclass(frozen=True)
class Subject:
    """What calls are about: a row of the data."""

    name: str
    text: str


@dataclass(frozen=True)
class Strike:
    """A call that was over its deadline, or whose worker died."""

    subject: Subject
    reason: str


class Strikes:
    """Shared by the pools of a rank, whose threads add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._new: list[Strike] = []
        self._under_way: list[Callable[[], list[Subject]]] = []

    def ask(self, under_way: Callable[[], list[Subject]]) -> None:
        """From now on ask a pool what its workers are at."""
        with self._lock:
            self._under_way.append(under_way)

    def under_way(self) -> list[Subject]:
        """What workers are at now; called by any thread."""
        with self._lock:
            return list({one.name: one for ask in self._under_way for one in ask()}.values())

    def add(self, strike: Strike) -> None:
        """Count one of this rank's calls."""
        with self._lock:
            self._counts[strike.subject.name] += 1
            self._new.append(strike)

    def learn(self, names: Iterable[str] | Mapping[str, int]) -> None:
        """Count strikes of other ranks, or of the run so far."""
        with self._lock:
            self._counts.update(names)

    @property
    def num_new(self) -> int:
        """This rank's strikes that weren't taken."""
        with self._lock:
            return len(self._new)

    def take_new(self) -> list[Strike]:
        """This rank's strikes since the last time."""
        with self._lock:
            new, self._new = self._new, []
            return new

    def refuses(self, subject: Subject | None) -> bool:
        """Whether calls about it are made no more."""
        with self._lock:
            return subject is not None and self._counts[subject.name] >= MOST_STRIKES
