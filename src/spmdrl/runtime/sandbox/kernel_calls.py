"""Linux calls for the sandbox that Python's library lacks."""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Any

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC = 1, 2, 4, 8, 32, 4096, 16384
MS_PRIVATE, MS_NOATIME, MS_NODIRATIME, MS_RELATIME = 1 << 18, 1024, 2048, 1 << 21
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_LIBC = ctypes.CDLL(None, use_errno=True)
_CAPABILITY_VERSION_3 = 0x20080522
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

MACHINES = tuple(_PIVOT_ROOT)
"""processors with known system call numbers"""


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def call(name: str, *arguments: Any) -> int:
    """Call a function of the C library. Raises OSError, naming the function, if it fails."""
    result: int = getattr(_LIBC, name)(*arguments)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """Enter new namespaces; a pid namespace applies to the next child."""
    call("unshare", flags)


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, data: str = "") -> None:
    """Mount a file system, or bind or remount a path."""
    arguments = (source.encode(), target.encode(), kind.encode() if kind else None)
    call("mount", *arguments, ctypes.c_ulong(flags), data.encode())


def enter_root(folder: str) -> None:
    """Make a mounted folder the root, and detach the former root."""
    os.chdir(folder)
    call("syscall", ctypes.c_long(_PIVOT_ROOT[platform.machine()]), b".", b".")
    call("umount2", b".", _MNT_DETACH)
    os.chdir("/")


def set_dumpable(value: bool) -> None:
    """Allow or forbid other processes of the user to inspect this one and own its files in /proc."""
    _prctl(_PR_SET_DUMPABLE, int(value))


def die_with(number: int) -> None:
    """Receive this signal when the parent ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def drop_privileges() -> None:
    """Give up all capabilities for good; later programs can't regain any."""
    for capability in range(64):
        try:
            _prctl(_PR_CAPBSET_DROP, capability)
        except OSError:
            break  # the first one unknown to this kernel
    header = _CapabilityHeader(_CAPABILITY_VERSION_3, 0)
    call("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def _prctl(option: int, argument: int) -> None:
    zero = ctypes.c_ulong(0)
    call("prctl", option, ctypes.c_ulong(argument), zero, zero, zero)
