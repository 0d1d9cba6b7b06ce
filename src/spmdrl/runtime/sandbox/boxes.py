"""Boxes for a policy's programs: made by a server process, used for one row, and removed with all their processes.

    server started (once) -> box opened -> run, run, ... -> box closed: the kernel ends its processes

A program reads and writes files in memory through descriptors; this process judges them: the tests' expected values are
never in the program's process.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import spmdrl
from spmdrl.runtime.sandbox import box_server

_START_SECONDS = 60.0
_EXTRA_SECONDS = 20.0
"""time that a box may take beyond its program's, on a busy machine"""
_ERROR_BYTES = 2000
FILE_BYTES = 16 << 20
"""largest file that a program may write, its output included"""


class SandboxRefused(Exception):
    """No box can be made here; the message has the reason."""


class BoxLost(Exception):
    """A box or its server ended by itself, through no fault of the program."""


@dataclass(frozen=True)
class Finished:
    """A program that has ended."""

    codes: list[int]
    """exit codes of its processes; negative: killed by that signal"""
    late: bool
    """True if it was killed at its time limit"""
    output: str
    """its stdout, or its tests' verdicts"""
    errors: str
    """end of its stderr"""


@dataclass(frozen=True)
class BoxLimits:
    """Limits of a program's resources."""

    memory_bytes: int
    readable: Sequence[str] = ()
    """folders beside Python's that it may read and import from"""


class BoxServer:
    """Server that makes boxes. The constructor raises SandboxRefused if the kernel allows this user none."""

    def __init__(self, limits: BoxLimits):
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def _start(self) -> None:
        own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        package = str(Path(spmdrl.__file__).parents[1])
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-B", "-m", box_server.__name__],
                stdin=its.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd="/",
                env={"PYTHONPATH": package, "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "TZ": "UTC"},
            )  # fmt: skip
        self._control = own
        limits = {"memory_bytes": self._limits.memory_bytes, "file_bytes": FILE_BYTES}
        own.send(json.dumps({"readable": list(self._limits.readable), "limits": limits}).encode())
        own.settimeout(_START_SECONDS)
        answer = own.recv(1 << 12)
        if b"ready" not in answer:
            self.close()
            assert self._process.stderr is not None
            why = json.loads(answer)["error"] if answer else self._process.stderr.read().decode(errors="replace")[-500:]
            raise SandboxRefused(why)

    @contextmanager
    def box(self) -> Iterator[Box]:
        """Open a new box; its processes end with the context."""
        assert self._process is not None
        if self._process.poll() is not None:
            self.close()
            self._start()
        own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with own:
            with its:
                socket.send_fds(self._control, [b"box"], [its.fileno()])
            yield Box(own)

    def close(self) -> None:
        """End the server and all boxes."""
        self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Box:
    """A box, which runs programs one after another; they share only a folder in memory."""

    def __init__(self, channel: socket.socket):
        self._channel = channel

    def run_program(self, source: str, given: str, seconds: float) -> Finished:
        """Run a script with this text as stdin."""
        return self._run("program", [source, given, "", ""], seconds, output=2)

    def run_assertions(self, source: str, spec: dict[str, Any], seconds: float) -> Finished:
        """Run tests that call a program; the output has a line of JSON for each."""
        return self._run("assertions", [source, json.dumps(spec), "", ""], seconds, output=2)

    def _run(self, kind: str, texts: Sequence[str], seconds: float, *, output: int) -> Finished:
        with ExitStack() as stack:
            files = [stack.enter_context(_in_memory(text)) for text in texts]
            message = json.dumps({"run": kind, "seconds": seconds}).encode()
            try:
                socket.send_fds(self._channel, [message], files)
            except OSError as error:
                raise BoxLost(f"the box ended before its program: {error}") from error
            self._channel.settimeout(seconds + _EXTRA_SECONDS)
            try:
                reply = self._channel.recv(1 << 12)
            except TimeoutError as error:
                raise BoxLost(f"the box didn't end its program after {seconds} seconds") from error
            if not reply:
                raise BoxLost("the box ended with its program")
            errors = _content(files[3])[-_ERROR_BYTES:].decode(errors="replace")
            return Finished(**json.loads(reply), output=_content(files[output]).decode(errors="replace"), errors=errors)


@contextmanager
def _in_memory(text: str) -> Iterator[int]:
    descriptor = os.memfd_create("box")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(text.encode(errors="surrogatepass"))
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def _content(descriptor: int) -> bytes:
    return os.pread(descriptor, FILE_BYTES, 0)
