"""Counts of calls that killed a worker, by subject; after two, further calls for it are refused."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

MOST_STRIKES = 2


@dataclass(frozen=True)
class Subject:
    """Subject of calls: a row of the data."""

    name: str
    text: str


@dataclass(frozen=True)
class Strike:
    """A call that was over its deadline, or whose worker died."""

    subject: Subject
    reason: str


class Strikes:
    """Strikes of a rank, shared by the threads of its pools."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._new: list[Strike] = []
        self._under_way: list[Callable[[], list[Subject]]] = []

    def ask(self, under_way: Callable[[], list[Subject]]) -> None:
        """Register a pool's function for the subjects at its workers."""
        with self._lock:
            self._under_way.append(under_way)

    def under_way(self) -> list[Subject]:
        """Return the subjects at workers now; for any thread."""
        with self._lock:
            return list({one.name: one for ask in self._under_way for one in ask()}.values())

    def add(self, strike: Strike) -> None:
        """Count a strike of this rank."""
        with self._lock:
            self._counts[strike.subject.name] += 1
            self._new.append(strike)

    def learn(self, names: Iterable[str] | Mapping[str, int]) -> None:
        """Add strikes of other ranks, or of the run so far."""
        with self._lock:
            self._counts.update(names)

    @property
    def num_new(self) -> int:
        """Number of this rank's strikes not yet taken."""
        with self._lock:
            return len(self._new)

    def take_new(self) -> list[Strike]:
        """Take this rank's strikes since the last call."""
        with self._lock:
            new, self._new = self._new, []
            return new

    def refuses(self, subject: Subject | None) -> bool:
        """Return True if calls about the subject are refused."""
        with self._lock:
            return subject is not None and self._counts[subject.name] >= MOST_STRIKES
