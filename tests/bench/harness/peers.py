"""Runs what a bench compares with as commands that answer requests, in environments of their own."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from spmdrl.verbs.doctor.commands import MOST_LOG_CHARACTERS, started, text_of


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
            raise RuntimeError(f"{command} sent no reply:\n{text_of(self._log)[-MOST_LOG_CHARACTERS:]}")
        return json.loads(line)


@contextlib.contextmanager
def running(command: Sequence[str], environment: Mapping[str, str], limit_seconds: float) -> Iterator[Peer]:
    """Start a command with some more variables, and end it on the way out; each reply may take `limit_seconds`."""
    with (
        tempfile.TemporaryFile() as log,
        started(command, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log) as process,
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
