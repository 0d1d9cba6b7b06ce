"""The end of a rank with the torchrun or msrun that started it, and the removal of torchrun's leftovers."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from spmdrl.runtime.supervision.agent import Duty, agent

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 1.0
_PROGRAMS = ("torchrun", "msrun")
_MODULES = ("torch.distributed.run", "torch.distributed.launch")


def end_with_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """Let the kernel and the agent end this process once its launcher is gone; ends at once if it already is.

    Killed by SIGKILL or SIGUSR1, torchrun leaves its ranks running, and msrun by SIGTERM too. Processes started
    otherwise aren't affected: srun ends its tasks itself, and a job of plain python outlives its shell under nohup.
    """
    if "TORCHELASTIC_RUN_ID" not in environ and environ.get("MS_ROLE") != "MS_WORKER":
        return
    parent = os.getppid()
    if not Path("/proc/self/stat").exists():
        _watch_parent(parent)
        return
    launcher = launcher_of(os.getpid())
    if launcher is None:
        # Orphaned while it started, or in a container of its own, whose launcher it can't see.
        if not _store_answers(environ):
            _end()
        _watch_parent(parent)
        return
    if launcher == parent and sys.platform == "linux":
        # Sent when the thread that started this process ends: the launcher's main thread.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A script may stand between the two, which outlives the launcher.
    try:
        descriptor = os.pidfd_open(launcher)
    except (OSError, AttributeError):
        _watch_parent(parent)
    else:
        agent.begin(Duty(_end, descriptor=descriptor))
    if launcher_of(os.getpid()) != launcher:
        _end()


def remove_empty_folders(environ: Mapping[str, str] = os.environ) -> None:
    """Remove the temporary folders that torchrun made for this rank, and never removes."""
    folder = Path(environ.get("TORCHELASTIC_ERROR_FILE", "")).parent
    with contextlib.suppress(OSError):
        while any(part.startswith("torchelastic_") for part in folder.parts):
            folder.rmdir()
            folder = folder.parent


def write_error_file(line: str, code: int, environ: Mapping[str, str] = os.environ) -> None:
    """Write a rank's last line and exit code to the error file that torchrun and scripts read."""
    path = environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {"py_callstack": line, "timestamp": str(int(time.time()))}
    message = {"message": line, "errorCode": code, "extraInfo": extra}
    # The line is on the screen already.
    with contextlib.suppress(OSError):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")


def launcher_of(pid: int) -> int | None:
    """Return the nearest ancestor that is a known launcher, else a Python program, which may use torch's API; or None.

    Orphans are adopted by an init process, which is neither.
    """
    ancestors = list(_ancestors(pid))
    for is_it in (_is_launcher, _is_python):
        for ancestor in ancestors:
            if is_it(_command(ancestor)):
                return ancestor
    return None


def namespace() -> str:
    """Return the namespace of process ids, such as `pid:[4026531836]`: a container has its own."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "no namespace"


def _store_answers(environ: Mapping[str, str]) -> bool:
    """Return True if the launcher's store, without which no rank can start, is reachable."""
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    try:
        socket.create_connection((environ["MASTER_ADDR"], int(environ["MASTER_PORT"])), timeout=5).close()
    except (OSError, KeyError, ValueError):
        return False
    return True


def _ancestors(pid: int) -> Iterator[int]:
    while (pid := int(_status(pid)[1])) > 0:
        yield pid


def process_state(pid: int) -> str:
    """Return the kernel's state letter of a process of this node, such as R or T; X if it is gone."""
    return _status(pid)[0]


def _status(pid: int) -> list[str]:
    try:
        # The name before it may hold spaces and parentheses.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _is_launcher(command: list[str]) -> bool:
    return any(re.split(r"[/.]", word)[-1] in _PROGRAMS or word in _MODULES for word in command)


def _is_python(command: list[str]) -> bool:
    return os.path.basename(command[0]).startswith(("python", "pypy")) if command else False


def _watch_parent(parent: int) -> None:
    def end_if_orphaned() -> None:
        if os.getppid() != parent:
            _end()

    agent.begin(Duty(end_if_orphaned, _POLL_SECONDS))


def _end() -> None:
    """End at once and silently: the user ended the launcher, and reward workers end with this process."""
    os.kill(os.getpid(), signal.SIGKILL)
