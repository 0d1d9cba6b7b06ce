"""Descendants of a process, found in /proc and killed even if they try to escape."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import signal
import sys
import time
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MAX_END_SECONDS = 10.0


@dataclass(frozen=True)
class Descendant:
    """A running process: parent, group, session, and start in clock ticks since boot."""

    pid: int
    parent: int
    group: int
    session: int
    start: int


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent ends, so that none leaves the tree. Linux."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies, even inside a loop that never returns to Python."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, argument: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, argument)


class ProcessTree:
    """Descendants of a process that adopts orphans; none are found without /proc."""

    def __init__(self, root: int):
        self._root = root
        self._own: set[int] = set()
        self._foreign: set[int] = set()
        self._newest = 0

    def members(self) -> list[Descendant]:
        """Return running descendants without the root. Cheap if no process started since the last call."""
        before: set[Descendant] = set()
        while True:
            newest = newest_process()
            if newest and newest == self._newest:
                pids = self._own
            else:
                pids = _all_pids()
                self._foreign &= pids
            found = {pid: one for pid in pids - self._foreign if (one := _read(pid)) is not None}
            self._own = _with_descendants({self._root}, found) & set(found) - {self._root}
            self._foreign = _with_descendants(self._foreign | {0}, found) - self._own - {0}
            self._newest = newest
            unclear = {one for pid, one in found.items() if pid not in self._own | self._foreign | {self._root}}
            if unclear <= before:
                # Their parents are hidden, like another user's processes.
                self._foreign |= {one.pid for one in unclear}
                return [found[pid] for pid in self._own]
            # Their parents have just ended: look again for the new ones.
            before, self._newest = unclear, 0

    def listed(self) -> list[Descendant]:
        """Return running descendants by the kernel's lists of children: `members`, without reading all processes.

        One that starts or ends meanwhile may be missing. Where the kernel keeps no such lists, it is `members`.
        """
        found: list[Descendant] = []
        pids = _children(self._root)
        if pids is None:
            return self.members()
        while pids:
            running = [one for pid in pids if (one := _read(pid)) is not None]
            found += running
            pids = [pid for one in running for pid in _children(one.pid) or ()]
        return found

    def end(self) -> bool:
        """Kill all descendants, repeatedly until none is left; False if some remain after 10 seconds.

        All are stopped before the first is killed: a stopped process starts no others.
        """
        deadline = time.monotonic() + _MAX_END_SECONDS
        stopped: set[tuple[int, int]] = set()
        while time.monotonic() < deadline:
            # Another process may have got the id of one that ended.
            self._foreign, self._newest = set(), 0
            members = self.members()
            if not members:
                return True
            new = [one for one in members if (one.pid, one.start) not in stopped]
            number = signal.SIGSTOP if new else signal.SIGKILL
            # A signal to a group reaches also what is being forked.
            for group in {one.group for one in new or members} - {os.getpgrp()}:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, number)
            for one in new or members:
                send(one.pid, number)
            stopped |= {(one.pid, one.start) for one in new}
            if not new:
                time.sleep(0.001)
        return False


def _with_descendants(pids: set[int], found: dict[int, Descendant]) -> set[int]:
    others = set(found) - pids
    while joined := {pid for pid in others if found[pid].parent in pids}:
        pids = pids | joined
        others -= joined
    return pids


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _all_pids() -> set[int]:
    try:
        return {int(name) for name in os.listdir("/proc") if name.isdigit()}
    except OSError:
        return set()


def _children(pid: int) -> list[int] | None:
    """Return the children of a process's threads; None without CONFIG_PROC_CHILDREN, or once it has ended."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
    except OSError:
        return None
    return found


def newest_process() -> int:
    """Return the newest process id, 0 without /proc; while it is the same, no process or thread was started."""
    try:
        with open("/proc/loadavg", "rb") as file:
            return int(file.read().split()[-1])
    except (OSError, IndexError, ValueError):
        return 0


def _read(pid: int) -> Descendant | None:
    """Read a process from /proc; None once it has ended, even if its parent hasn't collected it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, parent, group, session, *rest = file.read().rpartition(b")")[2].split()
    except (OSError, ValueError):
        return None
    # A zombie's children have gone to another parent.
    return None if state in (b"Z", b"X") else Descendant(pid, int(parent), int(group), int(session), int(rest[15]))


def is_over_memory(pids: list[int], limit_bytes: int) -> bool:
    """Return True if these processes hold more memory than the limit, with shared memory but without other files."""
    open_bytes = _open_memory_bytes(pids)
    fields = (b"RssAnon:", b"RssShmem:", b"VmSwap:")
    if open_bytes + sum(_field_bytes(f"/proc/{pid}/status", fields) for pid in pids) <= limit_bytes:
        return False
    # Shared pages were counted several times; this counts them once, and takes longer.
    private, shared = (
        sum(_field_bytes(f"/proc/{pid}/smaps_rollup", fields) for pid in pids)
        for fields in ((b"Pss_Anon:", b"SwapPss:"), (b"Pss_Shmem:",))
    )
    return private + max(shared, open_bytes) > limit_bytes


def _open_memory_bytes(pids: list[int]) -> int:
    """Return the bytes of all memfds that these processes have open; pages count even if unmapped."""
    sizes = dict[int, int]()
    for path in (path for pid in pids for path in glob.iglob(f"/proc/{pid}/fd/*")):
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith("/memfd:"):
                found = os.stat(path)
                sizes[found.st_ino] = found.st_blocks * 512
    return sum(sizes.values())


def _field_bytes(path: str, names: tuple[bytes, ...]) -> int:
    try:
        with open(path, "rb") as file:
            return sum(int(line.split()[1]) << 10 for line in file if line.startswith(names))
    except (OSError, ValueError):
        return 0
