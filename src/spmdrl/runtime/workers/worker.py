"""The child process that runs functions, forked by `guard`.

Calls come as lines of JSON on what was stdin, answers leave as such on what was stdout. Both pipes are moved out of the
functions' way first: what a function prints goes to stderr.
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
from typing import Any, BinaryIO, NoReturn

from spmdrl.runtime.workers.descent import die_with_parent
from spmdrl.runtime.workers.loading import explain

# What a worker reports to its guard, one per line, and the guard's answer.
LOADED, ENDED, SEEN = b"loaded", b"ended", b"."


def main(control: socket.socket) -> None:
    """Load the functions that the first line names, report that once, then answer call after call until they end."""
    die_with_parent()
    # Signals that a function sends to its own group or session don't reach the guard.
    os.setsid()
    # Slurm sends them to every process of a step, and ranks that are asked to stop finish what they do. Not ignored, as
    # what a function starts would inherit that.
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
    try:
        answer, facts = importlib.import_module(setup["runner"]).load(setup["functions"], setup["settings"])
    except BaseException as error:
        reason = no_terminal("a debugger", section) if isinstance(error, bdb.BdbQuit) else explain(error)
        is_explained = isinstance(error, ValueError)
        _write(
            results, {"error": str(error) if is_explained else f"{setup['functions_key']} can't be loaded: {reason}"}
        )
        return
    # What runs by now is the module's own, and not a call's.
    _report(control, LOADED)
    _write(results, {"ready": True, "facts": facts})
    # The last line is cut off where the rank died as it wrote it.
    while (line := calls.readline()).endswith(b"\n"):
        message = json.loads(line)
        nonce = message.pop("nonce")
        _write(results, {"nonce": nonce, "answer": answer(message)})
        sys.stdout.flush()
        # The next call finds nothing of this one.
        _report(control, ENDED)


def _report(control: socket.socket, what: bytes) -> None:
    """Report to the guard, and wait until it has acted on it."""
    control.send(what + b"\n")
    if control.recv(1) != SEEN:
        raise ConnectionError("the guard is gone")


def _write(results: BinaryIO, message: dict[str, Any]) -> None:
    results.write(json.dumps(message, default=str).encode() + b"\n")
    results.flush()


def _take_pipes(control: socket.socket) -> tuple[BinaryIO, BinaryIO]:
    """Move the pipes out of the way of what closes or writes low descriptors; stdout goes to stderr."""
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
    """Explain what waits for a person at a terminal; left alone, a debugger would read the end of an empty stdin."""

    def refuse(name: str) -> Any:
        def refused(*_: Any, **__: Any) -> NoReturn:
            raise RuntimeError(no_terminal(name, section))

        return refused

    sys.breakpointhook = refuse("breakpoint()")
    builtins.input = refuse("input() or a debugger")


def no_terminal(what: str, section: str) -> str:
    """The message where a function of this section of the configuration waits for input, and where it can."""
    return (
        f"a {section} function called {what}, but {section} processes have no terminal; run one rank under a "
        f"debugger, `python -m pdb -m spmdrl ...`: {section} functions then run inside it"
    )


def _limit_resources(memory_limit_bytes: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_limit_bytes is not None:
        # RLIMIT_DATA counts what can be written; RLIMIT_AS would also count what libraries only reserve. Shared memory
        # and all processes together are the guard's to count.
        already = [limit for limit in resource.getrlimit(resource.RLIMIT_DATA) if limit != resource.RLIM_INFINITY]
        lowest = min([memory_limit_bytes, *already])
        resource.setrlimit(resource.RLIMIT_DATA, (lowest, lowest))
