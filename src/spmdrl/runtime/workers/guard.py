"""The process between a rank and a worker: `python -m spmdrl.runtime.workers.guard PARENT MEMORY`.

It forks the worker, adopts its orphaned descendants, and kills all of them when the worker ends, when the rank closes
the pipe of calls or dies, and when they are too many or hold too much memory. Then it exits as the worker did, or with
a code of `ENDINGS`.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from spmdrl.runtime.screen import show
from spmdrl.runtime.workers import worker
from spmdrl.runtime.workers.descent import Descendant, ProcessTree, adopt_orphans, is_over_memory, newest_process, send

# A limit per user, as RLIMIT_NPROC is, would also count the threads of every rank of the node.
MAX_PROCESSES = 256
OVER_MEMORY, OVER_PROCESSES = 81, 82
# Messages by exit code; `{memory_limit}` is the setting's key.
ENDINGS = {
    OVER_MEMORY: "it held more than {memory_limit} together with the processes that it started",
    OVER_PROCESSES: f"it started more processes than could be ended, or had more than {MAX_PROCESSES} at a time",
}
_CHECK_SECONDS = 0.1
_MAX_SWEEP_SECONDS = 2.0


class Guard:
    """Watcher of one worker and its descendants."""

    def __init__(
        self, parent: int, worker_pid: int, control: socket.socket, memory_limit_bytes: int | None,
        check_seconds: float = _CHECK_SECONDS,
    ):  # fmt: skip
        """`check_seconds` is the least time between looks at the memory of all."""
        self._parent = parent
        self._worker = worker_pid
        self._control = control
        self._memory_limit_bytes = memory_limit_bytes
        self._check_seconds = check_seconds
        # Hundreds of guards that look ten times a second would take a tenth of a core.
        self._poll_seconds = max(_CHECK_SECONDS, check_seconds / 4)
        self._has_guards = False
        """true if what the worker starts has guards of its own"""
        self._tree = ProcessTree(os.getpid())
        self._kept: set[tuple[int, int]] = set()
        self._status: int | None = None
        self._newest = newest_process()

    def watch(self, calls_fd: int) -> int:
        """Return the exit code, as of `os.waitstatus_to_exitcode`, once the worker must end or has."""
        wake, waker = os.pipe()
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(calls_fd, 0)  # no events requested: only the hang-up is reported
        poll.register(self._control, select.POLLIN)
        poll.register(wake, select.POLLIN)
        next_check = time.monotonic() + self._check_seconds
        while True:
            ready = {fd for fd, _ in poll.poll(self._poll_seconds * 1000)}
            if wake in ready:
                os.read(wake, 4096)
            self._collect_ended()
            if self._status is not None:
                return os.waitstatus_to_exitcode(self._status)
            if calls_fd in ready or os.getppid() != self._parent:
                return -signal.SIGKILL
            if self._control.fileno() in ready and not self._follow(poll):
                return OVER_PROCESSES
            are_many = newest_process() - self._newest > MAX_PROCESSES
            if are_many or time.monotonic() > next_check:
                start = time.process_time()
                if code := self._broken_limit(are_many):
                    return code
                # With thousands of processes on a node a scan takes milliseconds: it stays at 1% of a core.
                next_check = time.monotonic() + max(self._check_seconds, 100 * (time.process_time() - start))

    def end_all(self) -> None:
        """Kill the worker and all that it started."""
        self._send_group(signal.SIGSTOP)
        self._tree.end()
        if self._status is None:
            # Without /proc only the worker's group is known.
            self._send_group(signal.SIGKILL)
            send(self._worker, signal.SIGKILL)
            os.waitpid(self._worker, 0)

    def _collect_ended(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._worker:
                self._status = status

    def _follow(self, poll: select.poll) -> bool:
        """Handle the worker's reports of calls; False if a call's leftovers can't be killed."""
        reports = self._control.recv(64)
        if not reports:
            poll.unregister(self._control)
        for report in reports.splitlines():
            self._has_guards |= report == worker.SERVES
            if report == worker.LOADED:
                self._kept = {(one.pid, one.start) for one in self._tree.members()}
            if report == worker.ENDED and not self._end_detached():
                return False
            with contextlib.suppress(BrokenPipeError):
                self._control.send(worker.SEEN)
        return True

    def _end_detached(self) -> bool:
        """Kill processes that the call left in other sessions or without a parent, and their descendants."""
        deadline = time.monotonic() + _MAX_SWEEP_SECONDS
        while detached := [one for one in self._tree.members() if self._is_detached(one)]:
            if time.monotonic() > deadline:
                return False
            for one in detached:
                send(one.pid, signal.SIGKILL)
            self._collect_ended()
        return True

    def _is_detached(self, one: Descendant) -> bool:
        if one.pid == self._worker or (one.pid, one.start) in self._kept:
            return False
        return one.parent == os.getpid() or one.session != self._worker

    def _send_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._worker, number)

    def _broken_limit(self, are_many: bool) -> int | None:
        if are_many:
            # Stopped meanwhile: a fork bomb would outrun the count.
            self._send_group(signal.SIGSTOP)
        self._newest = newest_process()
        members = self._tree.listed()
        if self._has_guards:
            # What lost its guard has come here.
            for one in members:
                if one.parent == os.getpid() and one.pid != self._worker:
                    send(one.pid, signal.SIGKILL)
            members = [one for one in members if one.pid == self._worker]
        pids = [one.pid for one in members]
        if len(pids) > MAX_PROCESSES:
            return OVER_PROCESSES
        if are_many:
            self._send_group(signal.SIGCONT)
        if self._memory_limit_bytes is not None and is_over_memory(pids, self._memory_limit_bytes):
            return OVER_MEMORY
        return None


def fork_watched(child: Callable[[socket.socket], object]) -> tuple[int, socket.socket]:
    """Fork `child`, and become the guard to be: adopt its orphans, ignore signals. Returns its id and the way to it."""
    adopt_orphans()
    guard_end, child_end = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        guard_end.close()
        child(child_end)
        os._exit(0)
    child_end.close()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    return pid, guard_end


def main(parent: int, memory_limit_bytes: int | None) -> NoReturn:
    """Fork the worker and watch it to its end."""
    said_fd, saying_fd = os.pipe()

    def work(control: socket.socket) -> None:
        os.dup2(saying_fd, 2)
        os.closerange(said_fd, saying_fd + 1)
        worker.main(control)

    worker_pid, guard_end = fork_watched(work)
    os.close(saying_fd)
    showing = threading.Thread(target=_show, args=(said_fd,), daemon=True)
    showing.start()
    calls_fd = os.dup(0)
    # The rank reads results up to the end of file, which needs the worker's end of the pipe closed.
    with open(os.devnull, "r+b") as nothing:
        for fd in (0, 1):
            os.dup2(nothing.fileno(), fd)
    guard = Guard(parent, worker_pid, guard_end, memory_limit_bytes)
    code = guard.watch(calls_fd)
    guard.end_all()
    showing.join(_CHECK_SECONDS)
    end_with(code)


def ending_of(code: int) -> str:
    """Describe an exit code, as of `os.waitstatus_to_exitcode`."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _show(said_fd: int) -> None:
    """Copy functions' output to stderr, without terminal control sequences."""
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    while said := os.read(said_fd, 1 << 16):
        # Keep reading, or the worker would block on a full pipe.
        with contextlib.suppress(BrokenPipeError):
            show(decoder.decode(said), stream=sys.stderr, end="")


def end_with(code: int) -> NoReturn:
    """End this process as another one ended, with `code` as of `os.waitstatus_to_exitcode`."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) or None)
