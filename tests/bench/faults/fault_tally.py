"""What benches of faults count: injections, those that were survived, and the longest time that one took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Tally:
    """One row of the table."""

    id: str
    """the promise's number in docs/reliability.md"""
    fault: str
    injected: int = 0
    survived: int = 0
    worst_seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    """what was not survived, and how it ended"""

    def count(self, seconds: float, problem: str | None) -> None:
        """Count one injection; `problem` is what the promise lacks, None where it was kept."""
        self.injected += 1
        self.survived += problem is None
        self.worst_seconds = max(self.worst_seconds, seconds)
        if problem is not None:
            self.failures.append(problem)

    @contextmanager
    def timed(self, what: str) -> Iterator[list[str]]:
        """Count the block as one injection; what it appends is a problem."""
        started, problems = time.perf_counter(), list[str]()
        yield problems
        self.count(time.perf_counter() - started, f"{what}: {problems[0]}" if problems else None)

    def row(self) -> dict[str, object]:
        return {
            "id": self.id, "fault": self.fault, "injected": self.injected, "survived": self.survived,
            "worst_seconds": round(self.worst_seconds, 4),
        }  # fmt: skip
