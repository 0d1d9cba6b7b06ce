"""The memory that the ranks of one node share for samples: one sparse file a rank, which all of them map.

The files have no name that could outlive the processes: the node's first rank makes them, the others open them through
it, and from then on they last as long as a process maps them. Only one rank, the writer, stores into a file; the first
part of it is the writer's journal.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmdrl.dataflow.samples.store.arena import Arena

JOURNAL_BYTES = 128 << 20
"""kept free of frames at the start of a file; pages that no message reaches cost nothing"""

_CLOSE_ON_EXEC = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class Place(NamedTuple):
    """Where a frame lies in the node's memory."""

    writer: int
    """the local rank that stored it"""
    start: int
    """bytes from the start of that writer's file"""
    num_bytes: int


class SharedFile(NamedTuple):
    """An empty file, and the path by which other processes open it."""

    descriptor: int
    path: str
    is_named: bool
    """the path stays until it is unlinked"""


def memory_file() -> SharedFile:
    """A file in memory, without a name. Linux only."""
    # By libc: builds of Python against an old one lack os.memfd_create on systems that have it.
    descriptor = _LIBC.memfd_create(b"spmdrl-samples", _CLOSE_ON_EXEC)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), f"memfd_create: {os.strerror(ctypes.get_errno())}")
    return SharedFile(descriptor, f"/proc/{os.getpid()}/fd/{descriptor}", is_named=False)


def temporary_file() -> SharedFile:
    """A file in the temporary folder, for platforms without files in memory."""
    descriptor, path = tempfile.mkstemp(prefix="spmdrl-samples-")
    return SharedFile(descriptor, path, is_named=True)


class PoolHost:
    """The process that made a node's files, until all ranks have opened them."""

    def __init__(self, num_files: int, file_bytes: int, create: Callable[[], SharedFile]):
        files: list[SharedFile] = []
        # Runs at the interpreter's end too, so that a failed start leaves no temporary file.
        self._forget = weakref.finalize(self, _forget, files)
        for _ in range(num_files):
            files.append(create())
            os.ftruncate(files[-1].descriptor, file_bytes)
        entries = [[file.path, os.fstat(file.descriptor).st_ino] for file in files]
        self.address = json.dumps({"files": entries, "file_bytes": file_bytes}).encode()
        """what the node's processes need to open the pool, the host's own included"""

    def forget_names(self) -> None:
        """End the opening: no process can open the files any more, and the memory lasts as long as those that did."""
        self._forget()


def host_pool(
    num_writers: int, capacity_bytes: int | None = None, *, create: Callable[[], SharedFile] | None = None
) -> PoolHost:
    """Make one sparse file a writer.

    `capacity_bytes`: what each writer may store, by default the machine's memory, since only pages that were written
    take memory. `create` makes one file, by default in memory wherever the platform can.
    """
    page = mmap.PAGESIZE
    capacity = os.sysconf("SC_PHYS_PAGES") * page if capacity_bytes is None else capacity_bytes
    if num_writers < 1 or capacity < 1:
        raise ValueError(f"a pool needs writers and room, but got {num_writers} writers of {capacity} bytes each")
    if create is None:
        create = memory_file if hasattr(_LIBC, "memfd_create") else temporary_file
    return PoolHost(num_writers, JOURNAL_BYTES + -(-capacity // page) * page, create)


class Pool:
    """A rank's part in its node's memory. Thread-safe.

    Views hold the memory mapped for as long as they live, after `close` too; what they show is only what was stored
    until the place is freed.
    """

    def __init__(self, address: bytes, writer: int):
        """Open what `host_pool` made; `writer` is this rank's file. A file that can't be opened is an OSError."""
        content = json.loads(address)
        files = content["files"]
        self.writer, self.num_writers = writer, len(files)
        self._file_bytes: int = content["file_bytes"]
        assert 0 <= writer < self.num_writers, (writer, self.num_writers)
        self._maps = [_map(path, inode, self._file_bytes) for path, inode in files]
        self._own_file = _open(*files[writer])
        self._close_own_file = weakref.finalize(self, os.close, self._own_file)
        self._lock = threading.Lock()
        self._arena = Arena(JOURNAL_BYTES, self._file_bytes)
        self._touched = JOURNAL_BYTES
        """pages of frames from here on are known to hold nothing"""

    def allocate(self, num_bytes: int) -> Place:
        """Room in this rank's file, from a multiple of 64 on; a MemoryError where none is left."""
        with self._lock:
            return Place(self.writer, self._arena.take(num_bytes), num_bytes)

    def view(self, place: Place) -> Tensor:
        """The bytes [num_bytes] at a place of any writer, uint8, without a copy."""
        writer, start, num_bytes = place
        known = 0 <= writer < self.num_writers and num_bytes > 0
        if not known or start < JOURNAL_BYTES or start + num_bytes > self._file_bytes:
            raise ValueError(
                f"{place} lies outside of the pool: {self.num_writers} writers, bytes {JOURNAL_BYTES} to "
                f"{self._file_bytes} of each file"
            )
        return torch.frombuffer(self._maps[writer], dtype=torch.uint8, count=num_bytes, offset=start)

    def free(self, place: Place) -> None:
        """Free room in this rank's file, which must not be read from then on."""
        assert place.writer == self.writer, f"{place} isn't writer {self.writer}'s to free"
        with self._lock:
            self._arena.give_back(place.start)

    def trim(self) -> None:
        """Return pages that nothing reached since the last trim to the system, and keep those that will be reused.

        Where the platform can't punch holes into files, they stay.
        """
        with self._lock:
            used_until = -(-self._arena.restart_peak() // mmap.PAGESIZE) * mmap.PAGESIZE
            if used_until < self._touched and hasattr(mmap, "MADV_REMOVE"):
                self._maps[self.writer].madvise(mmap.MADV_REMOVE, used_until, self._touched - used_until)
            self._touched = used_until

    @property
    def held_bytes(self) -> int:
        """What this rank's file takes of the machine's memory, its journal included."""
        return os.fstat(self._own_file).st_blocks * 512

    def journal_words(self, writer: int) -> NDArray[np.int64]:
        """The part of a writer's file that its journal lives in."""
        return np.frombuffer(self._maps[writer], dtype=np.int64, count=JOURNAL_BYTES // 8)

    def close(self) -> None:
        """Let go of the memory; the last process to do so frees it."""
        self._maps = []
        self._close_own_file()


def _forget(files: Sequence[SharedFile]) -> None:
    for file in files:
        os.close(file.descriptor)
        if file.is_named:
            os.unlink(file.path)


def _open(path: str, inode: int) -> int:
    """A descriptor of the file; another file under the same path is an OSError too."""
    hint = "the ranks of a node must run as one user, see each other in /proc, and start together"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise OSError(error.errno, f"can't open the node's sample memory: {error.strerror}; {hint}", path) from error
    if os.fstat(descriptor).st_ino != inode:
        os.close(descriptor)
        raise OSError(errno.ESTALE, f"this isn't the sample memory that the node's first rank made; {hint}", path)
    return descriptor


def _map(path: str, inode: int, num_bytes: int) -> mmap.mmap:
    descriptor = _open(path, inode)
    try:
        mapping = mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)
    # A crash must not spend minutes on writing a sparse map of the machine's whole memory, nor put samples on a disk.
    if hasattr(mmap, "MADV_DONTDUMP"):
        mapping.madvise(mmap.MADV_DONTDUMP)
    return mapping
