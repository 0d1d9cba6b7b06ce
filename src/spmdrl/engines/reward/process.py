"""A reward worker process as its parent sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from spmdrl.engines.reward.frames import FrameReader

_READ_BYTES = 1 << 16
_MAX_START_SECONDS = 120.0
# Rules are scalar code; the threads of numeric libraries would only take cores and address space from the rank.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class WorkerLost(Exception):
    """The worker's pipe ended, or holds something that isn't a frame."""


@dataclass(frozen=True)
class PendingCall:
    """A packed call that waits for a worker or is with one."""

    key: Hashable
    id: int
    frame: bytes
    num_rows: int


class WorkerProcess:
    """One child in a process group of its own: starting -> idle -> busy -> idle ... until `kill`."""

    def __init__(self, setup_frame: bytes):
        environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "spmdrl.engines.reward.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self.write_fd = self._process.stdin.fileno()
        self.read_fd = self._process.stdout.fileno()
        os.set_blocking(self.write_fd, False)
        os.set_blocking(self.read_fd, False)
        self._reader = FrameReader()
        self._unsent = memoryview(setup_frame)
        self.is_ready = False
        self.call: PendingCall | None = None
        self.deadline = time.monotonic() + _MAX_START_SECONDS

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_idle(self) -> bool:
        return self.is_ready and self.call is None

    @property
    def has_unsent(self) -> bool:
        return len(self._unsent) > 0

    @property
    def is_overdue(self) -> bool:
        return not self.is_idle and time.monotonic() > self.deadline

    def start(self, call: PendingCall, timeout_seconds: float) -> None:
        assert self.is_idle, (self.pid, self.call)
        self.call = call
        self.deadline = time.monotonic() + timeout_seconds
        self._unsent = memoryview(call.frame)

    def send(self) -> None:
        """Write as much as the pipe takes now."""
        try:
            self._unsent = self._unsent[os.write(self.write_fd, self._unsent) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            # The read end tells how it ended.
            self._unsent = memoryview(b"")

    def receive(self) -> list[Any]:
        """The messages that have come; raises WorkerLost where no more will."""
        try:
            data = os.read(self.read_fd, _READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise WorkerLost("its pipe ended")
        try:
            return self._reader.feed(data)
        except ValueError as error:
            raise WorkerLost(f"something else wrote into its pipe ({error})") from error

    def kill(self) -> str:
        """Kill the whole process group, wait for the process, and say how it ended."""
        # Before the wait: the unreaped leader keeps the group's id from being given to others.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
