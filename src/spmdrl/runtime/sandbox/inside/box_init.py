"""First process of a box: it runs the programs it receives one after another, and ends with all of them.

The kernel ends every process of a namespace with its first one. A program can neither look into this process, which has
more rights, nor end it: a first process gets no signal from its namespace unless it handles it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from spmdrl.runtime.sandbox import kernel_calls, syscall_filter
from spmdrl.runtime.sandbox.inside import assertions, program
from spmdrl.runtime.sandbox.kernel_calls import MS_NODEV, MS_NOEXEC, MS_NOSUID, mount
from spmdrl.runtime.sandbox.narrow_root import OWN_FOLDER

MAX_MESSAGE_BYTES = 1 << 12
MAX_DESCRIPTORS = 4
_MAX_FILES = 64
_MAX_THREADS = 64
_NO_DESCRIPTOR = -1


def main(channel: socket.socket, limits: dict[str, Any]) -> NoReturn:
    """Run requests from the channel until it is closed; each is a message with descriptors."""
    kernel_calls.die_with(signal.SIGKILL)
    kernel_calls.set_dumpable(False)
    mount("tmpfs", OWN_FOLDER, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC,
          f"size={limits['file_bytes']},nr_inodes=1024,mode=700")  # fmt: skip
    os.chdir(OWN_FOLDER)
    # Blocked and waited for, never handled: a program can send any signal at any moment.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    runs = {"program": _run_program, "assertions": _run_assertions}
    while True:
        data, descriptors, _, _ = socket.recv_fds(channel, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
        if not data:
            os._exit(0)
        message = json.loads(data)
        reply = _wait(runs[message["run"]](descriptors, limits | message), message["seconds"])
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(json.dumps(reply).encode())


def _run_program(descriptors: Sequence[int], limits: dict[str, Any]) -> list[int]:
    """Run the program alone, with stdin, stdout and stderr."""
    source, *streams = descriptors
    return [_start(program.run_main, source, streams, limits)]


def _run_assertions(descriptors: Sequence[int], limits: dict[str, Any]) -> list[int]:
    """Run tests and, in another process, the program that they call; only the tests can write the result."""
    source, tests, result, errors = descriptors
    asked, asks = os.pipe()
    answered, answers = os.pipe()
    common = [_NO_DESCRIPTOR, errors, errors]
    tester = _start(assertions.run, tests, [*common, answered, asks, result], limits)
    served = _start(program.serve, source, [*common, asked, answers], limits)
    for descriptor in (asked, asks, answered, answers):
        os.close(descriptor)
    return [tester, served]


def _start(run: Callable[[str], int], text: int, descriptors: Sequence[int], limits: dict[str, Any]) -> int:
    """Fork a process that runs a text with only these descriptors, as 0, 1, 2 and so on."""
    pid = os.fork()
    if pid != 0:
        return pid
    status = program.FAILED
    try:
        source = os.pread(text, os.fstat(text).st_size, 0).decode()
        _keep_only(descriptors)
        _confine(limits)
        status = run(source)
    finally:
        os._exit(status)


def _keep_only(descriptors: Sequence[int]) -> None:
    nothing = os.open("/dev/null", os.O_RDWR)
    # First move all above their final places, so that none is overwritten.
    moved = [fcntl.fcntl(nothing if one == _NO_DESCRIPTOR else one, fcntl.F_DUPFD, 64) for one in descriptors]
    for place, one in enumerate(moved):
        os.dup2(one, place)
    os.closerange(len(moved), resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def _confine(limits: dict[str, Any]) -> None:
    """Give up unneeded privileges for good."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    most_seconds = int(limits["seconds"]) + 1
    for kind, most in {
        resource.RLIMIT_CPU: most_seconds,
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: _MAX_FILES,
        resource.RLIMIT_NPROC: _MAX_THREADS,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }.items():
        # The soft limit of CPU time sends its own signal; the hard one would just kill.
        resource.setrlimit(kind, (most, most + (kind == resource.RLIMIT_CPU)))
    kernel_calls.drop_privileges()
    syscall_filter.install()


def _wait(processes: Sequence[int], seconds: float) -> dict[str, Any]:
    """Wait for the first of the processes, then kill all; report their exit codes and a timeout."""
    deadline = time.monotonic() + seconds
    ended, status = os.waitpid(processes[0], os.WNOHANG)
    while not ended and (left := deadline - time.monotonic()) > 0:
        signal.sigtimedwait([signal.SIGCHLD], left)
        ended, status = os.waitpid(processes[0], os.WNOHANG)
    statuses = {ended: status}
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, 0)
            statuses[pid] = status
    codes = [os.waitstatus_to_exitcode(statuses[pid]) for pid in processes]
    return {"codes": codes, "late": not ended}
