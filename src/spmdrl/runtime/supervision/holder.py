"""The holder of a run's folder: a lock that the kernel drops with its process, on a file that names the holder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

LOCK_FILE = "run.lock"
# Errors of file systems without locks.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}
_POLL_SECONDS = 0.1
_held_now: dict[Path, Holder] = {}


@dataclass(frozen=True)
class Holder:
    """The process that holds a folder, or that was killed while it did."""

    host: str
    pid: int
    started: str
    """local time, to the second"""
    boot: str = ""
    """boot id of the host's kernel; another one means that the process is gone"""

    @classmethod
    def this_process(cls) -> Holder:
        return cls(socket.gethostname(), os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S"), _boot_id())

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, started {self.started}"

    @property
    def is_gone(self) -> bool:
        """Return True if the process has certainly ended; always False for another host's."""
        if self.host != socket.gethostname():
            return False
        return self.boot != _boot_id() or not Path(f"/proc/{self.pid}").exists()


class FolderHeld(ValueError):
    """Another process holds the folder."""


@contextlib.contextmanager
def held(folder: Path, name: str = LOCK_FILE, *, wait_seconds: float = 0.0) -> Iterator[None]:
    """Hold a folder inside this block. Raises FolderHeld, which names the present holder.

    The kernel drops the lock with the process, whatever ends it, and on NFS with its host's lease. A process that is
    still dying gets `wait_seconds`. On a file system without locks, the record alone keeps a second process out.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    path, deadline = folder / name, time.monotonic() + wait_seconds
    while (descriptor := _locked(path)) is None:
        if time.monotonic() >= deadline:
            raise FolderHeld(f"{folder} is in use by {_recorded(path) or 'another process'}")
        time.sleep(_POLL_SECONDS)
    holder = Holder.this_process()
    try:
        content = json.dumps(asdict(holder)).encode()
        os.pwrite(descriptor, content, 0)
        os.ftruncate(descriptor, len(content))
        _held_now[path] = holder
        yield
    finally:
        with contextlib.suppress(OSError):
            # A lost lock is another holder's, whose record is in the file, or in one of the same name.
            if _is_open_as(descriptor, path) and _recorded(path) == holder:
                path.unlink()
            if is_new:
                # A refused start leaves no new folder.
                folder.rmdir()
        os.close(descriptor)
        if _held_now.get(path) is holder:
            del _held_now[path]


def lock_that_was_lost() -> Path | None:
    """Return the first lock that this process recorded as held, but whose file names another holder."""
    return next((path for path, holder in _held_now.items() if _recorded(path) != holder), None)


def is_held(folder: Path, name: str = LOCK_FILE) -> bool:
    """Return True if some process holds the folder now; changes nothing."""
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        recorded = _recorded(folder / name)
        return recorded is not None and not recorded.is_gone
    finally:
        os.close(descriptor)
    return False


def _locked(path: Path) -> int | None:
    """Return a locked descriptor of the file with this name, or None if another process has the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_free = _is_open_as(descriptor, path)
    except (BlockingIOError, FileNotFoundError):
        is_free = False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(descriptor)
            raise
        recorded = _recorded(path)
        is_free = recorded is None or recorded.is_gone or recorded.pid == os.getpid()
    if is_free:
        return descriptor
    os.close(descriptor)
    return None


def _is_open_as(descriptor: int, path: Path) -> bool:
    """Return True if the file still has this name: its folder may have been moved, or the file deleted."""
    return os.path.samestat(os.fstat(descriptor), path.stat())


def _recorded(path: Path) -> Holder | None:
    try:
        return Holder(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
