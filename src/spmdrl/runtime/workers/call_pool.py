"""Asynchronous calls: submitted, answered in workers, and collected."""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from spmdrl.runtime.screen import show
from spmdrl.runtime.supervision.activity import activity, first_few
from spmdrl.runtime.supervision.stop_request import stop_reason
from spmdrl.runtime.workers.call_queue import Call, CallQueue, PinnedCalls
from spmdrl.runtime.workers.process import PendingCall, WorkerLost, WorkerProcess, WorkerSetup
from spmdrl.runtime.workers.strikes import MOST_STRIKES, Strike, Strikes, Subject
from spmdrl.runtime.workers.verdict import Verdict

# Interval at which waits for calls check whether this process should stop.
_STOP_SECONDS = 0.25
# Time for last calls when the pool is closed.
_LAST_SECONDS = 5.0

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)


class Answers(Protocol[A_co]):
    """Answers of a pool, from workers' messages or failures."""

    def read(self, answer: Any, call: PendingCall, seconds: float) -> A_co | None:
        """Return a call's answer from a worker's message, made in `seconds`; None if others wrote it."""
        ...

    def failed(self, call: PendingCall, verdict: Verdict, error: str) -> A_co:
        """Return the answer of a call whose process was lost."""
        ...


class Unanswered(Exception):
    """The wait for calls was ended, because this process was asked to stop."""


class CallPool(Generic[A]):
    """Pool of worker processes: `submit` returns at once, `collect` waits.

    A thread keeps `num_workers` processes busy, kills those over their deadline and replaces those that died. The
    constructor returns once all have loaded the functions, and raises ValueError if one can't. Inline, `submit`
    computes the answer itself and nothing can be killed. `close` leaves no process behind.

    Calls of one affinity go to one worker, the least loaded one at first, until one that `is_last`; if it is lost, to
    another one.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        answers: Answers[A],
        *,
        num_workers: int,
        timeout_seconds: float,
        inline: Callable[[Call], A] | None = None,
        strikes: Strikes | None = None,
    ):
        """`strikes` counts calls that killed a worker; subjects with two are refused."""
        self._setup = setup
        self._answers = answers
        self._num_workers = num_workers
        self._timeout_seconds = timeout_seconds
        self._limit = f"{setup.section}.timeout_seconds = {timeout_seconds}"
        self._inline = inline
        self._strikes = strikes
        # Shared by callers and the pool's thread.
        self._changed = threading.Condition()
        self._waiting: set[Hashable] = set()
        self._answered: dict[Hashable, tuple[A, float]] = {}
        """answers with the `time.perf_counter` of their arrival"""
        self._failure: BaseException | None = None
        self._is_closed = False
        self._ends_at = math.inf
        """time when a closed pool ends"""
        self._pending = CallQueue()
        self._pinned = PinnedCalls()
        self._held: set[Hashable] = set()
        """affinities with open calls, inline"""
        self._started: Future[None] = Future()
        # Used by the pool's thread alone.
        self._workers: list[WorkerProcess] = []
        self._start_error: str | None = None
        if strikes is not None:
            strikes.ask(self._under_way)
        self.facts: Any = None
        """Facts about the functions, from the worker that loaded them; None inline."""
        if inline is not None:
            return
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=f"{setup.section}-calls", daemon=True)
        self._thread.start()
        try:
            self._started.result()
        except BaseException:
            self.close()
            raise

    def submit(self, calls: Sequence[Call]) -> None:
        """Submit calls; workers get several at a time and answer them one by one.

        Raises ValueError for a key that is still to be collected.
        """
        pending = [call.pending(self._timeout_seconds, self._limit) for call in calls] if self._inline is None else []
        section = self._setup.section
        with self._changed:
            if self._is_closed:
                raise RuntimeError(f"the {section} pool is closed")
            for call in calls:
                if call.key in self._waiting or call.key in self._answered:
                    raise ValueError(f"a {section} call with key {call.key!r} was submitted and not yet collected")
            self._waiting.update(call.key for call in calls if call.key is not None)
        if self._inline is not None:
            for call in calls:
                if call.opening is not None and call.affinity not in self._held:
                    self._held.add(call.affinity)
                    self._inline(call.opening)
                self.deliver(call.key, self._inline(call))
                self._held -= {call.affinity} if call.is_last else set()
        else:
            self._pending.add(call for call in pending if call.affinity is None)
            self._pinned.add(call for call in pending if call.affinity is not None)
            self._wake_up()

    def collect(self, keys: Sequence[Hashable]) -> list[A]:
        """Wait for these calls' answers and remove them from the pool, in the order of `keys`.

        Waits at most the time of all calls ahead of them or with them in a worker's queue. Raises Unanswered if this
        process is asked to stop before all have arrived.
        """
        self.wait(keys)
        with self._changed:
            if not self._waiting.isdisjoint(keys):
                raise Unanswered
            return [self._answered.pop(key)[0] for key in keys]

    def wait(self, keys: Sequence[Hashable], seconds: float | None = None) -> float | None:
        """Wait for these calls' answers; returns the `time.perf_counter` of the last one's arrival.

        Returns None if some haven't arrived after `seconds`, and the present time if this process is asked to stop.
        """
        section = self._setup.section
        with self._changed:
            unknown = [key for key in keys if key not in self._waiting and key not in self._answered]
            if unknown:
                raise KeyError(f"no {section} call was submitted under {unknown!r}, or it was collected before")
            if not self._wait_until_ended(keys, seconds):
                return None
            if stop_reason() is not None:
                return time.perf_counter()
            if not self._waiting.isdisjoint(keys):
                if self._failure is not None:
                    raise RuntimeError(f"the thread that watches the {section} processes failed") from self._failure
                raise RuntimeError(f"the {section} pool was closed with {len(self._waiting)} calls under way")
            return max((self._answered[key][1] for key in keys), default=0.0)

    def _wait_until_ended(self, keys: Sequence[Hashable], seconds: float | None) -> bool:
        """Wait for these calls, or for the pool's or this process's end; False after a timeout."""
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        activity.calls = lambda: self._describe(keys)

        def has_ended() -> bool:
            return self._waiting.isdisjoint(keys) or self._failure is not None or self._is_closed

        try:
            while stop_reason() is None:
                left = max(0.0, deadline - time.monotonic())
                if self._changed.wait_for(has_ended, min(left, _STOP_SECONDS)):
                    return True
                if left <= _STOP_SECONDS:
                    return False
            return True
        finally:
            activity.calls = None

    def _describe(self, keys: Sequence[Hashable]) -> str:
        waiting = [str(key) for key in keys if key in self._waiting]
        return f"waits for {len(waiting)} {self._setup.section} calls: {first_few(waiting)}"

    def _under_way(self) -> list[Subject]:
        """Return the subjects of the calls that workers compute now."""
        calls = [one.call for worker in self._workers.copy() for one in worker.begun.copy().values()]
        return [call.subject for call in calls if call.subject is not None]

    def close(self) -> None:
        """End the workers with all that they started; keep answers not yet collected, drop open calls.

        Only affinities' last calls are waited for, some seconds at most.
        """
        with self._changed:
            was_closed, self._is_closed = self._is_closed, True
            self._ends_at = min(self._ends_at, time.monotonic() + _LAST_SECONDS)
            self._changed.notify_all()
        if self._inline is None and not was_closed:
            self._wake_up()
            self._thread.join()
            self._wake.close()
            self._waker.close()

    def deliver(self, key: Hashable, answer: A) -> None:
        """Put an answer under a key, also one that needs no call; with the key None it is dropped."""
        activity.advance(f"{self._setup.section} answers")
        if key is None:
            return
        with self._changed:
            self._waiting.discard(key)
            self._answered[key] = answer, time.perf_counter()
            self._changed.notify_all()

    def _wake_up(self) -> None:
        # A full socket holds unread wake-ups.
        with contextlib.suppress(BlockingIOError):
            self._waker.send(b"\0")

    def _run(self) -> None:
        try:
            while not self._is_closed or (time.monotonic() < self._ends_at and self._pinned.owes_last(self._workers)):
                self._start_workers()
                self._dispatch()
                self._exchange()
                self._end_overdue()
        except BaseException as error:
            # `collect` raises it.
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            if not self._started.done():
                self._started.set_exception(error)
        finally:
            for worker in self._workers:
                worker.kill()

    def _start_workers(self) -> None:
        # After a failed start, the next one waits for a call that needs it.
        is_needed = self._pending or self._pinned
        while len(self._workers) < self._num_workers and (self._start_error is None or is_needed):
            self._start_error = None
            self._workers.append(WorkerProcess(self._setup))

    def _dispatch(self) -> None:
        self._pinned.pass_on(self._workers)
        for worker in self._workers:
            while worker.takes_calls and (worker.pinned or self._pending):
                calls: Sequence[PendingCall] = list(worker.pinned) or self._pending.take(self._num_workers)
                worker.pinned.clear()
                if calls := self._not_refused(calls):
                    worker.start(calls)
                    # An idle worker's pipe is empty: most calls fit into it without waiting for an event.
                    worker.send()

    def _not_refused(self, calls: Sequence[PendingCall]) -> list[PendingCall]:
        """Answer refused calls, and return the others."""
        if self._strikes is None:
            return list(calls)
        refused = {subject for subject in {call.subject for call in calls} if self._strikes.refuses(subject)}
        for call in calls:
            if call.subject in refused:
                self._fail(call, Verdict.QUARANTINED, f"this prompt cost {MOST_STRIKES} workers before")
        return [call for call in calls if call.subject not in refused]

    def _exchange(self) -> None:
        """Wait for the next event or deadline, then read and write."""
        # An epoll object would take several system calls to set up, for a handful of pipes.
        with selectors.PollSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            for worker in self._workers:
                selector.register(worker.read_fd, selectors.EVENT_READ, worker)
                if worker.has_unsent:
                    selector.register(worker.write_fd, selectors.EVENT_WRITE, worker)
            ready = selector.select(self._seconds_to_wait())
        for key, events in ready:
            if key.data is None:
                self._wake.recv(4096)
            elif key.data not in self._workers:
                continue  # an event before this one ended it
            elif events & selectors.EVENT_WRITE:
                key.data.send()
            else:
                self._receive(key.data)

    def _seconds_to_wait(self) -> float | None:
        deadlines = [worker.deadline for worker in self._workers]
        deadlines += [self._ends_at] if self._is_closed else []
        first = min(deadlines, default=math.inf)
        return None if first == math.inf else max(0.0, first - time.monotonic())

    def _receive(self, worker: WorkerProcess) -> None:
        try:
            messages = worker.receive()
        except WorkerLost as lost:
            self._lose(worker, Verdict.CRASHED, str(lost))
            return
        for message in messages:
            if not self._handle(worker, message):
                self._lose(worker, Verdict.CRASHED, "something else wrote into its pipe")
                return

    def _handle(self, worker: WorkerProcess, message: Any) -> bool:
        """Handle a worker's message; False if the worker may not send it now."""
        if not isinstance(message, dict):
            return False
        if not worker.is_ready and "error" in message:
            self._lose(worker, Verdict.CRASHED, str(message["error"]))
            return True
        if not worker.is_ready and "ready" in message:
            worker.is_ready, worker.is_concurrent = True, bool(message.get("is_concurrent"))
            self.facts = message.get("facts")
            if all(other.is_ready for other in self._workers) and not self._started.done():
                self._started.set_result(None)
            return True
        nonce, seconds = message.get("nonce"), message.get("seconds")
        if not isinstance(nonce, str) or nonce not in worker.begun or not isinstance(seconds, float):
            return False
        call = worker.begun[nonce].call
        answer = self._answers.read(message.get("answer"), call, seconds)
        if answer is None:
            return False
        worker.answered(call)
        self.deliver(call.key, answer)
        return True

    def _end_overdue(self) -> None:
        for worker in list(self._workers):
            if time.monotonic() > worker.deadline:
                late = min(worker.begun.values(), key=lambda one: one.deadline, default=None)
                self._lose(worker, Verdict.TIMED_OUT, f"it was over {late.call.limit if late else ''}")

    def _lose(self, worker: WorkerProcess, verdict: Verdict, reason: str) -> None:
        """Kill a worker, give the calls that it worked on the verdict, if late only the late ones; requeue the others.

        What it held of an affinity is lost: calls that opened or closed it are dropped, and others open it again.
        """
        now, is_late = time.monotonic(), verdict is Verdict.TIMED_OUT
        begun = [one.call for one in worker.begun.values() if now > one.deadline or not is_late]
        # A call fails with the one that was to open for it.
        failed = [call for call in worker.unanswered if call in begun or call.opening in begun]
        ending = worker.kill()
        self._workers.remove(worker)
        self._pending.put_back(self._pinned.take_back(worker, failed))
        if begun:
            call = begun[0]
            how = reason if is_late else f"{reason}, {ending}"
            if ending in self._setup.endings.values():
                how = ending
            when = "in this call" if call.key is not None else f"as it {'closed' if call.is_last else 'opened'} a row"
            when = when if len(begun) == 1 else f"in one of {len(begun)} calls"
            error = f"the {self._setup.section} process was lost {when}: {how}"
            if all(one.key is None for one in failed):
                show(error, stream=sys.stderr)
            if self._strikes is not None and call.subject is not None and len(begun) == 1:
                self._strikes.add(Strike(call.subject, error))
            for one in failed:
                self._fail(one, verdict, error)
        elif not worker.is_ready:
            if is_late:
                reason = "the functions took too long to load; keep slow work out of the module's top level"
            elif not reason.startswith(self._setup.functions_key):
                reason = f"the process that loads {self._setup.functions_key} was lost: {reason}, {ending}"
            self._start_error = reason
            if not self._started.done():
                self._started.set_exception(ValueError(reason))
            elif self._pending or self._pinned:
                error = f"no {self._setup.section} process could start: {reason}"
                first, *others = [self._pinned.pop()] if self._pinned else self._pending.take(self._num_workers)
                self._pending.put_back(others)
                self._fail(first, Verdict.CRASHED, error)

    def _fail(self, call: PendingCall, verdict: Verdict, error: str) -> None:
        self.deliver(call.key, self._answers.failed(call, verdict, error))
