"""Requests to stop, which make a run save and end: signals, a time limit, or another rank's request.

importing --verb begins--> setting up --first step--> running
ends at once               raises Stopped             only noted: ranks agree where they communicate anyway
                           --failure--> leaving: only noted, as a launcher sends it then too
"""

from __future__ import annotations

import _thread
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Literal

from spmdrl.runtime.screen import show
from spmdrl.runtime.supervision.agent import Duty, agent

STOPPED = 75
"""exit code of a run that was stopped on request and resumes when it is restarted (EX_TEMPFAIL)"""
UNSAVED = 74
"""exit code of a run that trained more than it could save (EX_IOERR), so that it must not be restarted"""
INTERRUPTED = 130
"""exit code of a run that Ctrl-C stopped, by the shells' convention"""
ENDED_TOGETHER = (STOPPED, UNSAVED, INTERRUPTED)
"""exit codes of ranks that agreed to end, after which a launcher must not restart any"""
# Handlers by signal that a request replaces. SIGHUP stays ignored under nohup, and Ctrl-C in a shell's background jobs;
# under a debugger it has another handler.
_REPLACED: dict[int, tuple[object, ...]] = {
    signal.SIGTERM: (signal.SIG_DFL, signal.SIG_IGN),
    signal.SIGUSR1: (signal.SIG_DFL, signal.SIG_IGN),
    signal.SIGHUP: (signal.SIG_DFL,),
    signal.SIGINT: (signal.default_int_handler,),
}
SIGNALS = tuple(_REPLACED)
_CTRL_C = "Ctrl-C"
# A signal that a launcher forwards arrives twice if the sender reached all processes.
_TWICE_SECONDS = 1.0
# Time in which a rank that is set up leaves by itself: its main thread may wait in C++, where no handler of Python
# runs. Launchers kill after 30 s.
_LEAVING_SECONDS = 20.0
_LOOK_SECONDS = 0.1
# Signal whose handler the main thread runs if another thread has found the request.
_FORWARDED = signal.SIGUSR1

Phase = Literal["importing", "setting up", "leaving", "running", "ending"]


class Stopped(BaseException):
    """The run ends on request, or with more than it could save; the text explains how to continue."""

    def __init__(self, reason: str, text: str, *, is_agreed: bool, code: int | None = None):
        """`code` is the exit code if it differs from the request's."""
        super().__init__(text)
        self.reason = reason
        self.code = code_of_stop(reason) if code is None else code
        self.is_agreed = is_agreed
        """true if all ranks end at the same place, so that none has to learn it from another"""


def code_of_stop(reason: str) -> int:
    """Return the exit code of a run that was asked to stop, and has saved."""
    return INTERRUPTED if reason.startswith(_CTRL_C) else STOPPED


def stop_words(reason: str) -> str:
    """Return the beginning of a line about such a run."""
    return "interrupted" if reason.startswith(_CTRL_C) else f"stopped by {reason}"


def _reason_of(number: int) -> str:
    return _CTRL_C if number == signal.SIGINT else signal.Signals(number).name


class StopAgreed(Exception):
    """All ranks must stop, at a place where the present step has changed nothing that is trained."""

    def __init__(self, reason: str):
        super().__init__(f"stopped by {reason}")
        self.reason = reason


class StopRequest:
    """State of a request to stop this process, and its reason."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.is_put_off = False
        """such as SIGTERM or Ctrl-C; None without a request"""
        self.is_handled = False
        """true while signals are recorded"""
        self.phase: Phase = "importing"
        self._is_main = False
        self._ours: frozenset[int] = frozenset()
        self._came: dict[int, float] = {}
        self._asked_at = math.inf
        """time of a signal during set-up"""

    @property
    def is_leaving(self) -> bool:
        """True if this rank was asked before the first step, so that it leaves without an agreement."""
        return self.reason is not None and self.phase in ("setting up", "leaving")

    def note(self, reason: str) -> None:
        """Ask this process to stop; the first reason counts."""
        self.reason = self.reason or reason

    @contextmanager
    def handling_signals(self, rank: int) -> Iterator[None]:
        """Handle SIGNALS as requests within the block; a repeated one ends the process at once."""
        self._is_main = rank == 0
        self.phase = "importing"
        self.reason = None
        self._came.clear()
        ours = [number for number, handlers in _REPLACED.items() if signal.getsignal(number) in handlers]
        before = {number: signal.signal(number, self._on_signal) for number in ours}
        self._ours = frozenset(ours)
        self.is_handled = True
        try:
            with self._leaving_in_time():
                yield
        finally:
            self.is_handled = False
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def _leaving_in_time(self) -> Iterator[None]:
        """Within the block, watch for signals by the agent, and end a rank that doesn't leave its set-up in time."""
        received, sent = socket.socketpair()
        sent.setblocking(False)
        self._asked_at = math.inf
        before = signal.set_wakeup_fd(sent.fileno(), warn_on_full_buffer=False)
        with received, sent, ExitStack() as duties:
            duties.callback(signal.set_wakeup_fd, before)
            duties.enter_context(
                agent.doing(Duty(lambda: self._learn(received.recv(1)[0]), descriptor=received.fileno()))
            )
            duties.enter_context(agent.doing(Duty(self._end_if_late, _LOOK_SECONDS)))
            yield

    def _learn(self, number: int) -> None:
        if number in self._ours and self.phase == "setting up":
            # Before the handler: other ranks learn it even while the main thread waits for one of them.
            self.note(_reason_of(number))
            self._asked_at = min(self._asked_at, time.monotonic())

    def _end_if_late(self) -> None:
        if time.monotonic() > self._asked_at + _LEAVING_SECONDS and self.is_handled and self.is_leaving:
            self._end_at_once()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.phase == "ending":
            # Everything is saved: a launcher ends its last ranks.
            return
        if number in self._came and now - self._came[number] >= _TWICE_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._came.setdefault(number, now)
        self.note(_reason_of(number))
        if self.phase == "importing":
            self._end_at_once()
        if self.phase == "setting up":
            self.raise_stopped()

    def begin_leaving(self) -> None:
        """Stop raising on requests, which would interrupt the handling of a failed start-up."""
        if self.phase == "setting up":
            self.phase = "leaving"

    def begin_set_up(self) -> None:
        """Raise Stopped on requests from here on, and for one that has already come."""
        self.phase = "setting up"
        if self.reason is not None and self.is_handled:
            self.raise_stopped()

    def end_by_signal(self) -> None:
        """End this process by SIGTERM, as a launcher expects that ends the remaining ranks; else do nothing."""
        if self.reason == signal.SIGTERM.name:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def note_from_afar(self, reason: str) -> None:
        """Record a request from another thread; the main thread raises Stopped as for a signal."""
        self.note(reason)
        if self.phase == "setting up" and self.is_handled:
            _thread.interrupt_main(_FORWARDED)

    def raise_stopped(self) -> None:
        """Raise Stopped on this rank, from which the others learn it; for the time before the first step."""
        raise Stopped(self.reason or "", "", is_agreed=False)

    def _end_at_once(self) -> None:
        if self._is_main:
            with suppress(OSError):
                show(f"spmdrl: {stop_words(self.reason or '')} before it began; start it again", stream=sys.stderr)
        sys.stderr.flush()
        os._exit(code_of_stop(self.reason or ""))


request = StopRequest()
"""request of this process, like its signals"""


def _forget_wakeup() -> None:
    # A forked process would write its own signals where this one reads.
    if request.is_handled:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_wakeup)


def stop_reason() -> str | None:
    """Return the reason of a request to stop, or None. Ranks may differ until they agree."""
    return None if request.is_put_off else request.reason


@contextmanager
def putting_off_stops() -> Iterator[None]:
    """Let a request to stop wait for the end of this block, in which not all ranks could agree about it."""
    request.is_put_off = True
    try:
        yield
    finally:
        request.is_put_off = False
