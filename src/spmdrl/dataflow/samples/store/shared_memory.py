"""Shared memory of a node's ranks for samples: one sparse file per rank, mapped by all.

The files have no names that could outlive the processes: the node's first rank makes them, the others open them through
it, and they last as long as a process maps them. Only one rank, the writer, appends frames to a file, until all are
forgotten at a step's end.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spmdrl.dataflow.samples.store.frame import ALIGNMENT
from spmdrl.nouns.batch import Integers
from spmdrl.resources.collectives import barrier, gather_bytes
from spmdrl.resources.world import World

_CLOSE_ON_EXEC = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class Place(NamedTuple):
    """Place of a frame in the node's memory."""

    writer: int
    """local rank that stored it"""
    start: int
    """bytes from the start of that writer's file"""
    num_bytes: int


class SharedFile(NamedTuple):
    """An empty file, and the path by which other processes open it."""

    descriptor: int
    path: str
    is_named: bool
    """True if the path stays until it is unlinked"""


def memory_file() -> SharedFile:
    """Return a file in memory, without a name. Linux only."""
    # By libc: builds of Python against an old one lack os.memfd_create on systems that have it.
    descriptor = _LIBC.memfd_create(b"spmdrl-samples", _CLOSE_ON_EXEC)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), f"memfd_create: {os.strerror(ctypes.get_errno())}")
    return SharedFile(descriptor, f"/proc/{os.getpid()}/fd/{descriptor}", is_named=False)


def temporary_file() -> SharedFile:
    """Return a file in the temporary folder, for platforms without files in memory."""
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
        """address for the node's processes, this one included, to open the pool"""

    def forget_names(self) -> None:
        """Close the files to further processes; the memory lasts as long as those that opened it."""
        self._forget()


def host_pool(
    num_writers: int, capacity_bytes: int | None = None, *, create: Callable[[], SharedFile] | None = None
) -> PoolHost:
    """Make one sparse file per writer.

    `capacity_bytes` is each writer's limit, by default the machine's memory, since only written pages take memory.
    `create` makes one file, by default in memory if the platform can.
    """
    page = mmap.PAGESIZE
    capacity = os.sysconf("SC_PHYS_PAGES") * page if capacity_bytes is None else capacity_bytes
    if num_writers < 1 or capacity < 1:
        raise ValueError(f"a pool needs writers and room, but got {num_writers} writers of {capacity} bytes each")
    if create is None:
        create = memory_file if hasattr(_LIBC, "memfd_create") else temporary_file
    return PoolHost(num_writers, -(-capacity // page) * page, create)


class Pool:
    """A rank's part in its node's memory.

    Views keep the memory mapped while they live, even after `close`; their content is valid until the writer clears its
    file.
    """

    def __init__(self, address: bytes, writer: int):
        """Open what `host_pool` made; `writer` is this rank's file. Raises OSError for a file that can't be opened."""
        content = json.loads(address)
        files = content["files"]
        self.writer, self.num_writers = writer, len(files)
        self._file_bytes: int = content["file_bytes"]
        assert 0 <= writer < self.num_writers, (writer, self.num_writers)
        self._maps = [_map(path, inode, self._file_bytes) for path, inode in files]
        self._arrays: dict[tuple[int, np.dtype[Any]], NDArray[Any]] = {}
        self._own_file = _open(*files[writer])
        self._close_own_file = weakref.finalize(self, os.close, self._own_file)
        self._end = 0
        """start of the next frame"""
        self._touched = 0
        """end of the pages that earlier batches touched"""

    def allocate(self, num_bytes: int) -> Place:
        """Allocate room in this rank's file, aligned to 64 bytes. Raises MemoryError if none is left."""
        assert num_bytes > 0, num_bytes
        start = self._end
        if start + num_bytes > self._file_bytes:
            raise MemoryError(
                f"{num_bytes} bytes of samples find no room: {start} of {self._file_bytes} bytes are taken; lower the "
                "rows of a step, or give the node more memory"
            )
        self._end = -(-(start + num_bytes) // ALIGNMENT) * ALIGNMENT
        return Place(self.writer, start, num_bytes)

    def array(self, writer: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return the whole of a writer's file as values of a dtype, without a copy."""
        if (writer, dtype) not in self._arrays:
            self._arrays[writer, dtype] = np.frombuffer(self._maps[writer], dtype)
        return self._arrays[writer, dtype]

    def check(self, places: Integers) -> None:
        """Raise ValueError for places [frames, 3 or more] that don't lie in the pool."""
        writers, starts, sizes = places[:, 0], places[:, 1], places[:, 2]
        # Compared with what is left, not added: a sum of two int64 may overflow.
        lies_in = (writers >= 0) & (writers < self.num_writers) & (starts >= 0) & (sizes > 0)
        lies_in &= (starts % ALIGNMENT == 0) & (starts <= self._file_bytes) & (sizes <= self._file_bytes - starts)
        if not lies_in.all():
            raise ValueError(
                f"{Place(*places[lies_in.argmin(), :3].tolist())} lies outside of the pool: {self.num_writers} "
                f"writers of {self._file_bytes} bytes each"
            )

    def clear(self) -> None:
        """Free all room in this rank's file, which must not be read afterwards.

        Pages that this batch touched are kept for the next one; those touched only by earlier ones return to the
        system, if the platform can punch holes into files.
        """
        used_until = -(-self._end // mmap.PAGESIZE) * mmap.PAGESIZE
        if used_until < self._touched and hasattr(mmap, "MADV_REMOVE"):
            self._maps[self.writer].madvise(mmap.MADV_REMOVE, used_until, self._touched - used_until)
        self._end, self._touched = 0, used_until

    @property
    def held_bytes(self) -> int:
        """Memory that this rank's file takes."""
        return os.fstat(self._own_file).st_blocks * 512

    def close(self) -> None:
        """Unmap the memory; the last process to do so frees it."""
        self._maps = []
        self._arrays = {}
        self._close_own_file()


def open_pool(world: World) -> Pool | None:
    """Return the memory that this node's ranks share, made by the first of them; None for a rank alone there.

    Collective over all ranks.
    """
    launch = world.launch
    if launch.local_world_size == 1:
        return None
    host = host_pool(launch.local_world_size) if launch.local_rank == 0 else None
    addresses = gather_bytes(host.address if host else b"")
    pool = Pool(addresses[launch.first_rank_of(launch.node_rank)], launch.local_rank)
    # Until all ranks have opened the memory, its maker must keep it open.
    barrier()
    if host is not None:
        host.forget_names()
    return pool


def _forget(files: Sequence[SharedFile]) -> None:
    for file in files:
        os.close(file.descriptor)
        if file.is_named:
            os.unlink(file.path)


def _open(path: str, inode: int) -> int:
    """Return a descriptor of the file. Raises OSError, also if another file has its path."""
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
    # Left out of core dumps: a crash must not spend minutes on a sparse map of the machine's whole memory, nor put
    # samples on a disk.
    if hasattr(mmap, "MADV_DONTDUMP"):
        mapping.madvise(mmap.MADV_DONTDUMP)
    return mapping
