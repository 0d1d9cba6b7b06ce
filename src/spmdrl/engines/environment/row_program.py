"""Programs of rows: a process each, forked from the server that they ask, under a guard of its own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from spmdrl.engines.environment.episode import Row
from spmdrl.runtime.workers.descent import die_with_parent
from spmdrl.runtime.workers.guard import ENDINGS, Guard, end_with, ending_of, fork_watched
from spmdrl.runtime.workers.loading import explain

Entry = Callable[[Row], Any] | Sequence[str]
"""A function of the row, or a command that reads the row as JSON on its standard input."""
# Hundreds of guards look at /proc.
_CHECK_SECONDS = 2.0
_MAX_OUTPUT_BYTES = 4000
_MAX_RESULT_BYTES = 1 << 16
_LAST_SECONDS = 1.0


@dataclass(frozen=True)
class ProgramEnd:
    """End of a program: with the value that a function gave, else with an error."""

    value: Any = None
    error: str | None = None


class Program:
    """A program and all that it started: running -> ended, by itself or by `kill`. Used in one event loop."""

    def __init__(self, pid: int, life_fd: int):
        """`life_fd` is the end of a pipe whose closing makes the guard `pid` kill all."""
        self._pid, self._life_fd = pid, life_fd
        self._output, self._result = _LastBytes(_MAX_OUTPUT_BYTES), _LastBytes(_MAX_RESULT_BYTES)

    @classmethod
    async def start(
        cls, entry: Entry, row: Row, variables: Mapping[str, str], memory_limit_bytes: int | None, kept: Sequence[int]
    ) -> Program:  # fmt: skip
        """Fork a program, which inherits the descriptors `kept` and no other files of this process."""
        pipes = [os.pipe() for _ in range(3)]
        (life, life_fd), (output_fd, output), (result_fd, result) = pipes
        with tempfile.TemporaryFile() as stdin:
            stdin.write(json.dumps(asdict(row), default=str).encode())
            stdin.seek(0)
            if (pid := os.fork()) == 0:
                with contextlib.suppress(BaseException):
                    _take_files(stdin.fileno(), output, {life, result, *kept})
                    _guard(lambda: _run(entry, row, variables, result), life, memory_limit_bytes)
                os._exit(1)
        for fd in (life, output, result):
            os.close(fd)
        program, loop = cls(pid, life_fd), asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: program._output, os.fdopen(output_fd, "rb"))
        await loop.connect_read_pipe(lambda: program._result, os.fdopen(result_fd, "rb"))
        return program

    def kill(self) -> None:
        """Begin to end it with all that it started."""
        if self._life_fd >= 0:
            os.close(self._life_fd)
            self._life_fd = -1

    async def end(self) -> ProgramEnd:
        """Wait until it and all that it started have ended. Called once."""
        await self._result.is_over.wait()
        with contextlib.suppress(asyncio.TimeoutError):
            # What it started may have outlived a guard that it killed.
            await asyncio.wait_for(self._output.is_over.wait(), _LAST_SECONDS)
        _, status = os.waitpid(self._pid, 0)
        self.kill()
        code, said = os.waitstatus_to_exitcode(status), self._output.last.decode(errors="replace").strip()
        try:
            result = json.loads(self._result.last)
        except ValueError:
            result = {}
        if code == 0 and "error" not in result:
            return ProgramEnd(result.get("value"))
        limits = ENDINGS[code].format(memory_limit="environment.memory_limit_gib") if code in ENDINGS else None
        error = limits or result.get("error") or f"it ended with {ending_of(code)}"
        return ProgramEnd(error=f"{error}{'; its last output: ' if said else ''}{said}")


class _LastBytes(asyncio.Protocol):
    """The last bytes that came through a pipe."""

    def __init__(self, num_bytes: int):
        self.last, self.is_over, self._num_bytes = b"", asyncio.Event(), num_bytes

    def data_received(self, data: bytes) -> None:
        self.last = (self.last + data)[-self._num_bytes :]

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_over.set()


def _take_files(stdin: int, output: int, kept: set[int]) -> None:
    """Replace standard files and close all others; a sibling's pipe that stayed open would keep that one alive."""
    for target, fd in enumerate((stdin, output, output)):
        os.dup2(fd, target)
    for fd in map(int, os.listdir("/dev/fd")):
        if fd > 2 and fd not in kept:
            with contextlib.suppress(OSError):
                os.close(fd)
    # Sockets of the server that the collector would close have numbers of other files now.
    gc.freeze()


def _guard(run: Callable[[], None], life: int, memory_limit_bytes: int | None) -> NoReturn:
    parent = os.getppid()
    pid, control = fork_watched(lambda _: run())
    guard = Guard(parent, pid, control, memory_limit_bytes, _CHECK_SECONDS)
    code = guard.watch(life)
    guard.end_all()
    end_with(code)


def _run(entry: Entry, row: Row, variables: Mapping[str, str], result: int) -> None:
    """Be the program, and write a function's value or an error into the pipe `result`."""
    die_with_parent()
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(variables)
    # Only the guard and the program hold the pipe, so that it ends with them.
    os.register_at_fork(after_in_child=lambda: os.close(result))
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = sys.stdout
    code, outcome = 1, dict[str, Any]()
    try:
        if callable(entry):
            value = entry(row)
            outcome = {"value": asyncio.run(value) if inspect.iscoroutine(value) else value}
            code = 0
        else:
            # Python ignores them, and a command would inherit that.
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            os.execvp(entry[0], [*entry])  # noqa: S606
    except BaseException as error:
        outcome = {"error": explain(error)}
    os.write(result, json.dumps(outcome, default=str)[:_MAX_RESULT_BYTES].encode())
    os._exit(code)
