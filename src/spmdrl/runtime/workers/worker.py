"""The child process that runs functions, forked by `guard`.

Calls arrive as lines of JSON on the original stdin, answers leave on the original stdout. Both pipes are moved out of
the functions' way first: a function's output goes to stderr.
"""

from __future__ import annotations

import bdb
import builtins
import contextlib
import faulthandler
import fcntl
import importlib
import json
import os
import resource
import signal
import socket
import sys
import time
from typing import Any, BinaryIO, NoReturn

from spmdrl.runtime.workers.descent import die_with_parent
from spmdrl.runtime.workers.loading import Loaded, explain

# A worker's reports to its guard, one per line, and the guard's answer.
LOADED, SERVES, ENDED, SEEN = b"loaded", b"serves", b"ended", b"."
MAX_LINE_BYTES = 1 << 30


def main(control: socket.socket) -> None:
    """Load the functions that the first line names, report once, then answer calls until they end."""
    die_with_parent()
    # Signals that a function sends to its own group or session don't reach the guard.
    os.setsid()
    # Slurm signals every process of a step, but ranks that are asked to stop finish their work first. A handler, as
    # child processes would inherit an ignored signal.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    calls, results = _take_pipes(control)
    faulthandler.enable()
    if not (first := calls.readline()).endswith(b"\n"):
        return
    setup = json.loads(first)
    section = setup["section"]
    _refuse_questions(section)
    _limit_resources(setup["memory_limit_bytes"])
    # Another Python that functions start, with packages of its own, must not load the job's.
    os.environ.pop("PYTHONPATH")
    if setup["python_path"] is not None:
        os.environ["PYTHONPATH"] = setup["python_path"]
    try:
        loaded: Loaded = importlib.import_module(setup["runner"]).load(setup["functions"], setup["settings"])
    except BaseException as error:
        reason = no_terminal("a debugger", section) if isinstance(error, bdb.BdbQuit) else explain(error)
        is_explained = isinstance(error, ValueError)
        _write(
            results, {"error": str(error) if is_explained else f"{setup['functions_key']} can't be loaded: {reason}"}
        )
        return
    # Processes that run by now belong to the module, not to a call.
    _report(control, SERVES if loaded.is_concurrent else LOADED)
    _write(results, {"ready": True, "facts": loaded.facts, "is_concurrent": loaded.is_concurrent})
    if loaded.is_concurrent:
        _answer_as_they_come(loaded, calls, results)
        return
    # The last line is cut off if the rank died while writing it.
    while (line := calls.readline()).endswith(b"\n"):
        message = json.loads(line)
        nonce, started = message.pop("nonce"), time.perf_counter()
        answer = loaded.answer(message)
        _write(results, {"nonce": nonce, "answer": answer, "seconds": time.perf_counter() - started})
        sys.stdout.flush()
        if not loaded.keeps_processes():
            # Leave nothing of this call to the next one.
            _report(control, ENDED)


def _answer_as_they_come(loaded: Loaded, calls: BinaryIO, results: BinaryIO) -> None:
    """Answer each call as soon as that can be, until they end."""
    # Other workers start in two thirds of the time without it.
    import asyncio

    async def answer(message: dict[str, Any]) -> None:
        nonce, started = message.pop("nonce"), time.perf_counter()
        answer = await loaded.answer(message)
        _write(results, {"nonce": nonce, "answer": answer, "seconds": time.perf_counter() - started})

    async def answer_all() -> None:
        reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), calls)
        under_way: set[asyncio.Task[None]] = set()
        while (line := await reader.readline()).endswith(b"\n"):
            task = asyncio.create_task(answer(json.loads(line)))
            under_way.add(task)
            task.add_done_callback(under_way.discard)

    asyncio.run(answer_all())


def _report(control: socket.socket, what: bytes) -> None:
    """Report to the guard, and wait until it has acted on it."""
    control.send(what + b"\n")
    if control.recv(1) != SEEN:
        raise ConnectionError("the guard is gone")


def _write(results: BinaryIO, message: dict[str, Any]) -> None:
    results.write(json.dumps(message, default=str).encode() + b"\n")
    results.flush()


def _take_pipes(control: socket.socket) -> tuple[BinaryIO, BinaryIO]:
    """Move the pipes away from low descriptors, which functions may close or write; stdout goes to stderr."""
    highest = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 4096)
    calls_fd, results_fd = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, highest - 16) for fd in (0, 1))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    control_fd = control.fileno()

    def close_in_child() -> None:
        for fd in (calls_fd, results_fd, control_fd):
            with contextlib.suppress(OSError):
                os.close(fd)

    os.register_at_fork(after_in_child=close_in_child)
    return os.fdopen(calls_fd, "rb"), os.fdopen(results_fd, "wb")


def _refuse_questions(section: str) -> None:
    """Make input() and debuggers raise an explanation instead of reading the end of an empty stdin."""

    def refuse(name: str) -> Any:
        def refused(*_: Any, **__: Any) -> NoReturn:
            raise RuntimeError(no_terminal(name, section))

        return refused

    sys.breakpointhook = refuse("breakpoint()")
    builtins.input = refuse("input() or a debugger")


def no_terminal(what: str, section: str) -> str:
    """Return the message for a function of this section that waits for input."""
    return (
        f"a {section} function called {what}, but {section} processes have no terminal; run one rank under a "
        f"debugger, `python -m pdb -m spmdrl ...`: {section} functions then run inside it"
    )


def _limit_resources(memory_limit_bytes: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_limit_bytes is not None:
        # RLIMIT_DATA counts writable memory; RLIMIT_AS would also count memory that libraries only reserve. The guard
        # counts shared memory and all processes together.
        already = [limit for limit in resource.getrlimit(resource.RLIMIT_DATA) if limit != resource.RLIM_INFINITY]
        lowest = min([memory_limit_bytes, *already])
        resource.setrlimit(resource.RLIMIT_DATA, (lowest, lowest))
