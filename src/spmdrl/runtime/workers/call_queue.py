"""Calls to workers, and their division among the workers."""

from __future__ import annotations

import secrets
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from spmdrl.runtime.workers.process import PendingCall, WorkerProcess, line_of
from spmdrl.runtime.workers.strikes import Subject


@dataclass(frozen=True)
class Call:
    """A question to a worker."""

    key: Hashable
    """key under which the caller collects the answer; None: it isn't collected"""
    message: dict[str, Any]
    num_rows: int = 1
    seconds: float | None = None
    """time limit; None: the pool's"""
    subject: Subject | None = None
    """subject of the call; None: not counted if it kills a worker"""
    affinity: Hashable = None
    """calls with the same one go to the same worker while it lives; None: any worker takes it"""
    opening: Call | None = None
    """call without key and affinity that precedes it if its affinity has no worker yet; this one fails with it"""
    limit: str = ""
    """setting of its time limit, for messages; empty: the pool's"""

    @property
    def is_last(self) -> bool:
        """True for a call that ends its affinity; not made if that has no worker, as what it held is gone."""
        return self.key is None and self.affinity is not None

    def pending(self, timeout_seconds: float, limit: str) -> PendingCall:
        """Return the call as sent; arguments are the pool's limit. Raises ValueError if it is too large."""
        nonce = secrets.token_hex(16)
        return PendingCall(
            self.key, nonce, line_of({"nonce": nonce, **self.message}), self.num_rows, self.seconds or timeout_seconds,
            self.subject, self.affinity, None if self.opening is None else self.opening.pending(timeout_seconds, limit),
            self.limit or limit, self.is_last,
        )  # fmt: skip


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


class PinnedCalls:
    """Calls with an affinity, and the workers that they go to. Any thread may `add`; only one uses the rest."""

    def __init__(self) -> None:
        self._calls: deque[PendingCall] = deque()
        """calls that are in no worker's queue"""
        self._pins: dict[Hashable, WorkerProcess] = {}

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, calls: Iterable[PendingCall]) -> None:
        """Queue calls in the order in which they must be made."""
        self._calls.extend(calls)

    def pop(self) -> PendingCall:
        """Take the first call that is in no worker's queue."""
        return self._calls.popleft()

    def pass_on(self, workers: Sequence[WorkerProcess]) -> None:
        """Put the calls into their workers' queues; new affinities get the worker that has the fewest."""
        while self._calls and workers:
            call = self._calls.popleft()
            worker = self._pins.get(call.affinity)
            if call.is_last:
                self._pins.pop(call.affinity, None)
            elif worker is None:
                load = Counter(self._pins.values())
                worker = self._pins[call.affinity] = min(workers, key=lambda one: load[one])
                worker.pinned.extend([call.opening] if call.opening else [])
            if worker is not None:
                worker.pinned.append(call)

    def owes_last(self, workers: Sequence[WorkerProcess]) -> bool:
        """Return True if a call that ends its affinity isn't answered."""
        self.pass_on(workers)
        return any(call.is_last for worker in workers for call in worker.unanswered)

    def take_back(self, lost: WorkerProcess, failed: Sequence[PendingCall]) -> list[PendingCall]:
        """Queue a lost worker's other calls again, to be opened elsewhere; returns those without an affinity."""
        self._pins = {affinity: worker for affinity, worker in self._pins.items() if worker is not lost}
        left = [call for call in lost.unanswered if call.key is not None and call not in failed]
        self._calls.extendleft(call for call in reversed(left) if call.affinity is not None)
        return [call for call in left if call.affinity is None]
