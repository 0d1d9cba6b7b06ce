"""Calls to workers, and how many of those that wait a worker gets at a time."""

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
    """What a worker is to answer."""

    key: Hashable
    """the caller's, under which it collects the answer"""
    message: dict[str, Any]
    num_rows: int = 1
    extra_seconds: float = 0.0
    """what it may take beyond the pool's time for a call"""
    subject: Subject | None = None
    """what it is about; None: it isn't counted when it costs a worker"""

    def pending(self, timeout_seconds: float) -> PendingCall:
        """The call as it is sent, with the pool's time for a call. Raises ValueError where it is too large for that."""
        nonce = secrets.token_hex(16)
        line = line_of({"nonce": nonce, **self.message})
        return PendingCall(self.key, nonce, line, self.num_rows, timeout_seconds + self.extra_seconds, self.subject)


class CallQueue:
    """The oldest submission first. Any thread may `add`; all else is one thread's."""

    def __init__(self) -> None:
        self._submissions: deque[deque[PendingCall]] = deque()

    def __bool__(self) -> bool:
        return bool(self._submissions)

    def add(self, calls: Iterable[PendingCall]) -> None:
        """Queue calls that were submitted together."""
        if together := deque(calls):
            self._submissions.append(together)

    def take(self, num_workers: int) -> list[PendingCall]:
        """The next calls for one of so many workers, all from one submission; at least one.

        One that is alone gets all. Others get half of their share of what is left: the less is left, the fewer go at a
        time, so that all end at about the same time, and a call that hangs keeps few others from an idle worker.
        """
        oldest = self._submissions[0]
        number = len(oldest) if num_workers == 1 else -(-len(oldest) // (2 * num_workers))
        taken = [oldest.popleft() for _ in range(number)]
        if not oldest:
            self._submissions.popleft()
        return taken

    def put_back(self, calls: Iterable[PendingCall]) -> None:
        """Queue calls again that a worker didn't come to, before all others."""
        if again := deque(calls):
            self._submissions.appendleft(again)
