"""Runs what a bench compares with as commands, and leaves no process of theirs behind, not even a daemon."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

MARK, _BEFORE_MARK = "SPMDRL_BENCH_COMMAND", "/"
_MOST_LOG_CHARACTERS = 3000


class CommandFailed(RuntimeError):
    """A command failed, or took too long."""

    def __init__(self, command: Sequence[str], how: str, log: str):
        super().__init__(f"{shlex.join(command)} ended with {how}:\n{log[-_MOST_LOG_CHARACTERS:]}")
        self.how = how
        """its exit code, negative for a signal, or `nothing within 10 s`"""
        self.log = log
        """its stderr"""


def run_to_end(command: Sequence[str], environment: Mapping[str, str], limit_seconds: float) -> str:
    """Run a command with some more variables; returns what it printed.

    Raises CommandFailed with the end of its stderr if it fails or takes too long.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as log:
        with _started(command, environment, stdin=subprocess.DEVNULL, stdout=out, stderr=log) as process:
            try:
                code = process.wait(limit_seconds)
                how = str(code) if code else ""
            except subprocess.TimeoutExpired:
                how = f"nothing within {limit_seconds:g} s"
        if how:
            raise CommandFailed(command, how, _text(log))
        return _text(out)


class Peer:
    """A running command that sends a line of JSON on stdout for each line on its stdin (see replies.py)."""

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes], limit_seconds: float):
        self._process = process
        self._log = log
        self._limit_seconds = limit_seconds

    def request(self, line: str) -> Any:
        """Send a line, and wait for the reply. Raises RuntimeError as `reply` does."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        return self.reply()

    def reply(self) -> Any:
        """Wait for a reply without a request. Raises RuntimeError with the end of its stderr if none comes in time."""
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
            raise RuntimeError(f"{command} sent no reply:\n{_text(self._log)[-_MOST_LOG_CHARACTERS:]}")
        return json.loads(line)


@contextlib.contextmanager
def running(command: Sequence[str], environment: Mapping[str, str], limit_seconds: float) -> Iterator[Peer]:
    """Start a command with some more variables, and end it on the way out; each reply may take `limit_seconds`."""
    with (
        tempfile.TemporaryFile() as log,
        _started(command, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log) as process,
    ):
        yield Peer(process, log, limit_seconds)


def copy_modules(names: Iterable[str], folder: Path) -> None:
    """Copy modules below `folder`, with the packages above them, for a Python that doesn't have this package."""
    root = Path(__file__).parents[3]
    for name in names:
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            spec = importlib.util.find_spec(".".join(parts[:depth]))
            assert spec is not None and spec.origin is not None
            target = folder / Path(spec.origin).relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(spec.origin, target)


@contextlib.contextmanager
def _started(
    command: Sequence[str], environment: Mapping[str, str], **streams: Any
) -> Iterator[subprocess.Popen[bytes]]:
    # Whatever the command starts inherits the mark, also where it leaves the command's session. Commands that it runs
    # with marks of their own keep this one too, or they would outlive it where it is killed.
    mark = uuid.uuid4().hex
    variables = {**os.environ, **environment, MARK: f"{os.environ.get(MARK, '')}{_BEFORE_MARK}{mark}"}
    with sigterm_as_exit():
        process = subprocess.Popen(command, env=variables, start_new_session=True, **streams)
        try:
            yield process
        finally:
            _end(process, mark)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


@contextlib.contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """Make SIGTERM raise SystemExit in the main thread, as SIGINT raises KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread receives signals and may install handlers.
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kill what is left of a command: its session, and on systems with /proc everything that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    # A process that dies may have started another one just before.
    while left := marked_processes(mark):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def marked_processes(mark: str) -> list[int]:
    """Processes with this mark in their environment; those that have ended show none."""
    name, found = f"{MARK}=".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            if any(line.startswith(name) and f"{_BEFORE_MARK}{mark}".encode() in line for line in variables):
                found.append(int(folder.name))
    return found
