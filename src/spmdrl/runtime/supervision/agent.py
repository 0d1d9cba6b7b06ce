"""The agent: the one thread beside a rank's work. It waits for times and descriptors, and runs the duties then due.

A duty must not wait for other processes or network files: all others would wait with it.
"""

from __future__ import annotations

import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from spmdrl.runtime.screen import show_exception

# Limit of waiting for a running duty at its end.
_DONE_SECONDS = 1.0
# Without a duty that is due earlier; `poll` takes no infinity.
_LONGEST_SECONDS = 3600.0


@dataclass(eq=False)
class Duty:
    """Work that is due at intervals, or whenever a descriptor is readable."""

    work: Callable[[], None]
    seconds: float = math.inf
    """interval"""
    descriptor: int = -1

    def __post_init__(self) -> None:
        self.due = time.monotonic() + self.seconds


class Agent:
    """Thread for duties, started with the first one; it lives as long as the process."""

    def __init__(self) -> None:
        self._reset()
        # A forked process has no thread, and its own duties.
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._duties: list[Duty] = []
        self._working = threading.Lock()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self, duty: Duty) -> None:
        """Run the duty from now on."""
        self._duties.append(duty)
        with self._starting:
            if self._thread is None:
                self._received, self._sent = socket.socketpair()
                self._sent.setblocking(False)
                self._thread = threading.Thread(target=self._run, name="agent", daemon=True)
                self._thread.start()
        with suppress(BlockingIOError):
            self._sent.send(b"\0")

    @contextmanager
    def doing(self, duty: Duty) -> Iterator[None]:
        """Run the duty within the block, whose end waits at most a second for a running one."""
        self.begin(duty)
        try:
            yield
        finally:
            with suppress(ValueError):
                self._duties.remove(duty)
            if self._working.acquire(timeout=_DONE_SECONDS):
                self._working.release()

    def _run(self) -> None:
        while True:
            readable = self._wait()
            if self._received.fileno() in readable:
                self._received.recv(1 << 10)
            for duty in self._duties.copy():
                if duty.descriptor in readable or time.monotonic() >= duty.due:
                    self._do(duty)

    def _wait(self) -> set[int]:
        """Wait until a descriptor is readable or a duty is due; returns the readable descriptors."""
        poll, duties = select.poll(), self._duties.copy()
        for descriptor in (self._received.fileno(), *(duty.descriptor for duty in duties if duty.descriptor >= 0)):
            poll.register(descriptor, select.POLLIN)
        seconds = min((duty.due for duty in duties), default=math.inf) - time.monotonic()
        return {descriptor for descriptor, _ in poll.poll(min(max(seconds, 0.0), _LONGEST_SECONDS) * 1000)}

    def _do(self, duty: Duty) -> None:
        with self._working:
            if duty not in self._duties:
                return
            try:
                duty.work()
            except Exception as error:
                # The other duties continue.
                self._duties.remove(duty)
                show_exception(type(error), error, error.__traceback__)
        duty.due = time.monotonic() + duty.seconds


agent = Agent()
"""agent of this process"""
