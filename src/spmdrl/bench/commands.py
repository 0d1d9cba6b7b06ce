"""Runs a bench's command to its end, and leaves no process of it behind, not even a daemon that it started."""

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

_MARK = "SPMDRL_BENCH_COMMAND"
_LAST_WORDS = 3000


def run_to_end(command: Sequence[str], environment: Mapping[str, str], limit_seconds: float) -> None:
    """Run a command with some more variables. Raises RuntimeError with its last words if it fails or takes too long."""
    # Whatever the command starts inherits the mark, also where it leaves the command's session.
    mark = uuid.uuid4().hex
    variables = {**os.environ, **environment, _MARK: mark}
    with tempfile.TemporaryFile() as log, sigterm_as_exit():
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=variables, start_new_session=True
        )
        try:
            code: object = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            code = f"nothing within {limit_seconds:g} s"
        finally:
            _end(process, mark)
        if code:
            log.seek(0)
            words = log.read().decode(errors="replace")[-_LAST_WORDS:]
            raise RuntimeError(f"{shlex.join(command)} ended with {code}:\n{words}")


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
    """Kill what is left of a command: its session, and where /proc tells, all that it started."""
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
