"""Runs a bench's commands, and leaves no process of them behind, not even a daemon that they started."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_MARK = "SPMDRL_BENCH_COMMAND"
_LAST_WORDS = 3000


def run_to_end(command: Sequence[str], environment: Mapping[str, str], limit_seconds: float) -> None:
    """Run a command with some more variables. Raises RuntimeError with its last words if it fails or takes too long."""
    with tempfile.TemporaryFile() as log:
        with _started(command, environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as process:
            try:
                code: object = process.wait(limit_seconds)
            except subprocess.TimeoutExpired:
                code = f"nothing within {limit_seconds:g} s"
        if code:
            raise RuntimeError(f"{shlex.join(command)} ended with {code}:\n{_last_words(log)}")


class Answering:
    """A command that answers each line that it is given with a line of its own."""

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes], limit_seconds: float):
        self._process = process
        self._log = log
        self._limit_seconds = limit_seconds

    def ask(self, line: str) -> str:
        """Give it a line and wait for its answer. Raises RuntimeError with its last words if none comes in time."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        return self.answer()

    def answer(self) -> str:
        """Wait for a line that needs no asking. Raises RuntimeError with its last words if none comes in time."""
        assert self._process.stdout is not None
        # What ends the process ends the wait, as its pipe closes.
        alarm = threading.Timer(self._limit_seconds, self._process.kill)
        alarm.start()
        try:
            line = self._process.stdout.readline()
        finally:
            alarm.cancel()
        if not line:
            command = shlex.join(map(str, self._process.args))
            raise RuntimeError(f"{command} gave no answer:\n{_last_words(self._log)}")
        return line.decode()


@contextlib.contextmanager
def answering(command: Sequence[str], environment: Mapping[str, str], limit_seconds: float) -> Iterator[Answering]:
    """Start a command with some more variables, and end it on the way out; each answer may take `limit_seconds`."""
    with (
        tempfile.TemporaryFile() as log,
        _started(command, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log) as process,
    ):
        yield Answering(process, log, limit_seconds)


@contextlib.contextmanager
def _started(
    command: Sequence[str], environment: Mapping[str, str], **streams: Any
) -> Iterator[subprocess.Popen[bytes]]:
    # Whatever the command starts inherits the mark, also where it leaves the command's session.
    mark = uuid.uuid4().hex
    variables = {**os.environ, **environment, _MARK: mark}
    with sigterm_as_exit():
        process = subprocess.Popen(command, env=variables, start_new_session=True, **streams)
        try:
            yield process
        finally:
            _end(process, mark)


def _last_words(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")[-_LAST_WORDS:]


@contextlib.contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """Make SIGTERM raise SystemExit in the main thread, as SIGINT raises KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread receives signals and may say what they do.
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kill what is left of a command: its session, and where there is a /proc, all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    # A process that dies may have started another one just before.
    while left := _marked(mark):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _marked(mark: str) -> list[int]:
    """Processes with this mark in their environment; those that have ended show none."""
    line, found = f"{_MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if line in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found
