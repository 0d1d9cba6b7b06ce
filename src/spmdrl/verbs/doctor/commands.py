"""Execution of commands to their end or time limit, leaving no process behind, not even a daemon."""

from __future__ import annotations

import contextlib
import json
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

MARK, _BEFORE_MARK = "SPMDRL_MARK", "/"
MOST_LOG_CHARACTERS = 3000


class CommandFailed(RuntimeError):
    """A command failed, or took too long."""

    def __init__(self, command: Sequence[str], how: str, log: str):
        super().__init__(f"{shlex.join(command)} ended with {how}:\n{log[-MOST_LOG_CHARACTERS:]}")
        self.how = how
        """exit code, negative for a signal, or `nothing within 10 s`"""
        self.log = log
        """its stderr"""


def run_to_end(command: Sequence[str], environment: Mapping[str, str], limit_seconds: float) -> str:
    """Run a command with additional environment variables; returns its output.

    Raises CommandFailed with the end of its stderr if it fails or takes too long.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as log:
        with started(command, environment, stdin=subprocess.DEVNULL, stdout=out, stderr=log) as process:
            try:
                code = process.wait(limit_seconds)
                how = str(code) if code else ""
            except subprocess.TimeoutExpired:
                how = f"nothing within {limit_seconds:g} s"
        if how:
            raise CommandFailed(command, how, text_of(log))
        return text_of(out)


def ranks_command(num_ranks: int) -> list[str]:
    """Return the beginning of a command, up to a module's `-m`, that runs it on so many ranks here."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    return [sys.executable, *(torchrun if num_ranks > 1 else [])]


def train_to_end(
    words: Sequence[str], num_ranks: int, folder: Path, limit_seconds: float = 3600
) -> list[dict[str, float]]:
    """Train on ranks of this machine in a new run folder; returns the metrics of each step. Raises CommandFailed."""
    command = [*ranks_command(num_ranks), "-m", "spmdrl", "train", *words, f"run.dir={folder}"]
    run_to_end(command, {"OMP_WAIT_POLICY": "PASSIVE"}, limit_seconds)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def text_of(file: IO[bytes]) -> str:
    """Return the whole content of an open file."""
    file.seek(0)
    return file.read().decode(errors="replace")


@contextlib.contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str], **streams: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command with additional environment variables; on exit kill it and everything that it started."""
    # Whatever the command starts inherits the mark, even outside of the command's session. Commands that it runs with
    # marks of their own keep this one too, or they would outlive it when it is killed.
    mark = uuid.uuid4().hex
    variables = {**os.environ, **environment, MARK: f"{os.environ.get(MARK, '')}{_BEFORE_MARK}{mark}"}
    with sigterm_as_exit():
        process = subprocess.Popen(command, env=variables, start_new_session=True, **streams)
        try:
            yield process
        finally:
            _end(process, mark)


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
    # A dying process may have started another one just before.
    while left := marked_processes(mark):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def marked_processes(mark: str) -> list[int]:
    """Return processes with this mark in their environment; ended ones show none."""
    name, found = f"{MARK}=".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            if any(line.startswith(name) and f"{_BEFORE_MARK}{mark}".encode() in line for line in variables):
                found.append(int(folder.name))
    return found
