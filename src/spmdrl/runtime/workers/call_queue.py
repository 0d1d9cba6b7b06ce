"""Calls to workers, and their division among the workers."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from spmdrl.runtime.workers.process import PendingCall, line_of
from spmdrl.runtime.workers.strikes import Subject


@dataclass(frozen=True)
class Call:
    """A question to a worker."""

    key: Hashable
    """key under which the caller collects the answer"""
    message: dict[str, Any]
    num_rows: int = 1
    extra_seconds: float = 0.0
    """time that it may take beyond the pool's limit"""
    subject: Subject | None = None
    """subject of the call; None: not counted if it kills a worker"""

    def pending(self, timeout_seconds: float) -> PendingCall:
        """Return the call as sent, with its deadline in seconds. Raises ValueError if it is too large."""
        nonce = secrets.token_hex(16)
        line = line_of({"nonce": nonce, **self.message})
        return PendingCall(self.key, nonce, line, self.num_rows, timeout_seconds + self.extra_seconds, self.subject)


class CallQueue:
    """Queue of calls, oldest submission first. Any thread may `add`; only one uses the rest."""

    def __init__(self) -> None:
        self._submissions: deque[deque[PendingCall]] = deque()

    def __bool__(self) -> bool:
        return bool(self._submissions)

    def add(self, calls: Iterable[PendingCall]) -> None:
        """Queue calls that were submitted together."""
        if together := deque(calls):
            self._submissions.append(together)

    def take(self, num_workers: int) -> list[PendingCall]:
        """Take the next calls for one of `num_workers` workers, all from one submission; at least one.

        A single worker gets all. Others get half of their share of the rest, so that batches shrink, all workers end at
        about the same time, and a hanging call keeps few others from an idle worker.
        """
        oldest = self._submissions[0]
        number = len(oldest) if num_workers == 1 else -(-len(oldest) // (2 * num_workers))
        taken = [oldest.popleft() for _ in range(number)]
        if not oldest:
            self._submissions.popleft()
        return taken

    def put_back(self, calls: Iterable[PendingCall]) -> None:
        """Put calls that a worker didn't reach at the front of the queue."""
        if again := deque(calls):
            self._submissions.appendleft(again)
