"""Boxes for programs that a policy wrote: made by a server process, used for one row, and gone with all that they ran.

    server started (once) -> box opened -> run, run, ... -> box closed: the kernel ends its processes

What a program reads and writes are files in memory, of which it has the descriptors and this process the verdict: the
tests' expected values never are in the program's process.
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
"""what a box may take beyond its program's time, on a machine that is busy"""
_ERROR_BYTES = 2000
FILE_BYTES = 16 << 20
"""most bytes of a file that a program writes, its output included"""


class SandboxRefused(Exception):
    """No box can be made here, for the reason that is the message."""


class BoxLost(Exception):
    """A box or its server ended by itself, which is no fault of the program's."""


@dataclass(frozen=True)
class Finished:
    """A program that has ended."""

    codes: list[int]
    """exit codes of its processes, negative: ended by that signal"""
    late: bool
    """whether it was ended as its time was over"""
    output: str
    """what it wrote to stdout, or its tests' verdicts"""
    errors: str
    """the end of what it wrote to stderr"""


@dataclass(frozen=True)
class BoxLimits:
    """What a program may use."""

    memory_bytes: int
    readable: Sequence[str] = ()
    """folders that it may read besides Python's, and import from"""


class BoxServer:
    """Starts in the constructor, and raises SandboxRefused where the kernel makes no boxes for this user."""

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
        """A new box; its processes end with the context."""
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
    """Runs programs one after the other, which share a folder in memory and nothing else."""

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
