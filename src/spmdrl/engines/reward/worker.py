"""The child process that runs reward functions, forked by `guard`.

Calls come as frames on what was stdin, scores leave as frames on what was stdout. Both pipes are moved out of the
functions' way first: what a function prints goes to stderr.
"""

from __future__ import annotations

import bdb
import builtins
import contextlib
import faulthandler
import fcntl
import os
import resource
import socket
import sys
from typing import Any, BinaryIO, NoReturn

from spmdrl.engines.reward.calls import FunctionScores, RewardCall
from spmdrl.engines.reward.descent import die_with_parent
from spmdrl.engines.reward.frames import pack, read_frame
from spmdrl.engines.reward.functions import RewardFunction, load_functions, required_columns, score
from spmdrl.engines.reward.verdict import Verdict

# What a worker reports to its guard, one a line, and the guard's answer.
LOADED, ENDED, SEEN = b"loaded", b"ended", b"."


def main(control: socket.socket) -> None:
    """Load the functions that the first frame names, answer once, then score call after call until the calls end."""
    die_with_parent()
    # Signals that a function sends to its own group or session don't reach the guard.
    os.setsid()
    calls, results = _take_pipes(control)
    faulthandler.enable()
    _refuse_questions()
    setup = read_frame(calls)
    if setup is None:
        return
    _limit_resources(setup["memory_limit_bytes"])
    try:
        functions = load_functions(setup["functions"])
    except ValueError as error:
        _write(results, {"error": str(error)})
        return
    except bdb.BdbQuit:
        _write(results, {"error": f"reward.functions can't be loaded: {_no_terminal('a debugger')}"})
        return
    # What runs by now is the module's own, and not a call's.
    _report(control, LOADED)
    _write(results, {"ready": True, "columns": required_columns(functions)})
    while (message := read_frame(calls)) is not None:
        nonce = message.pop("nonce")
        _write(results, {"nonce": nonce, "scores": _scores(functions, message)})
        # The next call finds nothing of this one.
        _report(control, ENDED)


def _report(control: socket.socket, what: bytes) -> None:
    """Report to the guard, and wait until it has acted on it."""
    control.send(what + b"\n")
    if control.recv(1) != SEEN:
        raise ConnectionError("the guard is gone")


def _scores(functions: list[RewardFunction], message: dict[str, Any]) -> list[dict[str, Any]]:
    call = RewardCall(message["prompts"], message["completions"], message["completion_ids"], message["columns"])
    parts = [_score(function, call) for function in functions]
    sys.stdout.flush()
    return [{"values": part.values, "verdicts": part.verdicts, "error": part.error} for part in parts]


def _score(function: RewardFunction, call: RewardCall) -> FunctionScores:
    try:
        return score(function, call)
    except bdb.BdbQuit:
        error = f"{function.name}: {_no_terminal('a debugger')}"
        return FunctionScores.failed(call.num_rows, Verdict.CRASHED, error)


def _write(results: BinaryIO, message: dict[str, Any]) -> None:
    results.write(pack(message))
    results.flush()


def _take_pipes(control: socket.socket) -> tuple[BinaryIO, BinaryIO]:
    """Move the frames' pipes out of the way of what closes or writes low descriptors; stdout goes to stderr."""
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


def _refuse_questions() -> None:
    """Explain what waits for somebody at a terminal; left alone, a debugger would read the end of an empty stdin."""

    def refuse(name: str) -> Any:
        def refused(*_: Any, **__: Any) -> NoReturn:
            raise RuntimeError(_no_terminal(name))

        return refused

    sys.breakpointhook = refuse("breakpoint()")
    builtins.input = refuse("input() or a debugger")


def _no_terminal(what: str) -> str:
    return (
        f"a reward called {what}, but reward processes have no terminal; run one rank under a debugger, "
        "`python -m pdb -m spmdrl ...`: rewards are then computed inside it"
    )


def _limit_resources(memory_limit_bytes: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_limit_bytes is not None:
        # RLIMIT_DATA counts what can be written; RLIMIT_AS would also count what libraries only reserve. Shared memory
        # and all processes together are the guard's to count.
        resource.setrlimit(resource.RLIMIT_DATA, (memory_limit_bytes, memory_limit_bytes))
