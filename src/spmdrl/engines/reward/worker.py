"""The child process that runs reward functions: `python -m spmdrl.engines.reward.worker`.

Calls come as frames on stdin, scores leave as frames on stdout. Both pipes are moved out of the functions' way first:
what a function prints goes to stderr. The process leads its own group, which ends with its parent, however that ends.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import select
import signal
import sys
from typing import Any, BinaryIO

from spmdrl.engines.reward.calls import RewardCall
from spmdrl.engines.reward.frames import pack, read_frame
from spmdrl.engines.reward.functions import RewardFunction, load_functions, score

_PR_SET_PDEATHSIG = 1
_GUARD_INTERVAL_MILLISECONDS = 200


def main() -> None:
    """Load the functions that the first frame names, answer once, then score call after call until stdin ends."""
    _die_with_parent()
    calls, results = _take_pipes()
    _start_guard(calls, results)
    faulthandler.enable()
    setup = read_frame(calls)
    if setup is None:
        return
    _limit_resources(setup["memory_limit_bytes"])
    try:
        functions = load_functions(setup["functions"])
    except ValueError as error:
        _write(results, {"error": str(error)})
        return
    _write(results, {"ready": True})
    while (message := read_frame(calls)) is not None:
        _write(results, {"id": message["id"], "scores": _scores(functions, message)})


def _scores(functions: list[RewardFunction], message: dict[str, Any]) -> list[dict[str, Any]]:
    call = RewardCall(message["prompts"], message["completions"], message["completion_ids"], message["columns"])
    parts = [score(function, call) for function in functions]
    sys.stdout.flush()
    return [{"values": part.values, "verdicts": part.verdicts, "error": part.error} for part in parts]


def _write(results: BinaryIO, message: dict[str, Any]) -> None:
    results.write(pack(message))
    results.flush()


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Move the frames' pipes to descriptors that no subprocess inherits, and point stdout at stderr."""
    calls = os.fdopen(os.dup(0), "rb")
    results = os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return calls, results


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies, even inside a loop that never returns to Python."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _start_guard(calls: BinaryIO, results: BinaryIO) -> None:
    """Fork a process that kills the whole group once the parent or this process is gone.

    So the functions' own children die too, and none of them keeps the results' pipe open.
    """
    worker = os.getpid()
    if os.fork() != 0:
        return
    results.close()
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    poll = select.poll()
    poll.register(calls.fileno(), 0)  # no event asked for: only the hang-up is reported
    while os.getppid() == worker and not poll.poll(_GUARD_INTERVAL_MILLISECONDS):
        pass
    os.killpg(0, signal.SIGKILL)


def _limit_resources(memory_limit_bytes: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_limit_bytes is not None:
        # RLIMIT_DATA counts what can be written; RLIMIT_AS would also count what libraries only reserve.
        resource.setrlimit(resource.RLIMIT_DATA, (memory_limit_bytes, memory_limit_bytes))


if __name__ == "__main__":
    main()
