"""The process that makes boxes: `python -S -m spmdrl.runtime.sandbox.box_server`, with a socket as stdin.

It enters the namespaces and makes the narrow root once, then forks a box for each descriptor it receives. No row passes
through it. It reports that it is ready, or why it can't make boxes here.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import sys
from typing import Any, NoReturn

from spmdrl.runtime.sandbox import kernel_calls, narrow_root
from spmdrl.runtime.sandbox.inside import box_init
from spmdrl.runtime.sandbox.kernel_calls import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    unshare,
)

_NOBODY = 65534
_INSIDE_ID = 1000
_SHARED = CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP


def main() -> NoReturn:
    """Make boxes until the other end of the socket is closed."""
    kernel_calls.die_with(signal.SIGKILL)
    control = socket.socket(fileno=0)
    settings = json.loads(control.recv(1 << 16))
    try:
        _enter_namespaces(settings["readable"])
    except OSError as error:
        control.send(json.dumps({"error": str(error)}).encode())
        os._exit(0)
    package = os.environ["PYTHONPATH"]
    sys.path[:] = [path for path in sys.path if path != package and os.path.isdir(path)] + settings["readable"]
    os.environ.clear()
    # Boxes end by themselves; they are reaped automatically.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control.send(json.dumps({"ready": True}).encode())
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 64, 1)
        if not data:
            os._exit(0)
        if os.fork() == 0:
            control.close()
            _make_box(descriptors[0], settings["limits"])
        os.close(descriptors[0])


def _enter_namespaces(readable: list[str]) -> None:
    if platform.machine() not in kernel_calls.MACHINES:
        known = " and ".join(kernel_calls.MACHINES)
        raise OSError(f"the numbers of system calls are known for {known}, but this machine is {platform.machine()}")
    places = narrow_root.readable_places(readable)
    own = os.open("/proc/self", os.O_PATH | os.O_DIRECTORY)
    if os.geteuid() == 0 and _can_be_nobody():
        # As nobody from here on: an escape from a box through a kernel bug wouldn't be root.
        unshare(_SHARED)
        narrow_root.enter(places)
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        kernel_calls.set_dumpable(True)
        _enter_user_namespace(own, CLONE_NEWNS)
    else:
        _enter_user_namespace(own, _SHARED)
        narrow_root.enter(places)
    os.close(own)
    kernel_calls.set_dumpable(False)


def _can_be_nobody() -> bool:
    """Return True if this namespace has the user nobody; an ordinary user's container may have only root."""
    with open("/proc/self/uid_map") as lines:
        ranges = [[int(word) for word in line.split()] for line in lines]
    return any(first <= _NOBODY < first + count for first, _, count in ranges)


def _enter_user_namespace(own: int, beside: int) -> None:
    user, group = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER | beside)
    ids = {"uid_map": f"{_INSIDE_ID} {user} 1", "setgroups": "deny", "gid_map": f"{_INSIDE_ID} {group} 1"}
    for name, text in ids.items():
        with open(os.open(name, os.O_WRONLY, dir_fd=own), "w") as file:
            file.write(text)


def _make_box(descriptor: int, limits: dict[str, Any]) -> NoReturn:
    """Fork a box's first process and act as its parent, outside the box."""
    kernel_calls.die_with(signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    unshare(CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC)
    first = os.fork()
    if first == 0:
        box_init.main(socket.socket(fileno=descriptor), limits)
    os.close(descriptor)
    os.waitpid(first, 0)
    os._exit(0)


if __name__ == "__main__":
    main()
