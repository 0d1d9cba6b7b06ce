"""Host side of the swap: its interface, and a file as the one beside a CPU.

A CPU's device memory *is* host memory, so bytes kept in it would free nothing: they go to an unlinked temporary file.
"""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch


@dataclass(frozen=True)
class Span:
    """A storage of `num_bytes` bytes, and the place of its host copy."""

    storage: torch.UntypedStorage = field(repr=False)
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class CopyTimes:
    """Start and end of a copy, in seconds of `time.perf_counter`."""

    start: float
    end: float

    def joined(self, other: CopyTimes) -> CopyTimes:
        return CopyTimes(min(self.start, other.start), max(self.end, other.end))

    def share_before(self, moment: float) -> float:
        """Return the share of the copy's time before a moment."""
        passed = min(self.end, moment) - self.start
        return max(0.0, passed / (self.end - self.start)) if self.end > self.start else 1.0


class Ticket(Protocol):
    """A copy under way."""

    def is_done(self) -> bool: ...

    def wait(self) -> None:
        """Return when the copy has ended, or raise its error."""


class ReturnTicket(Ticket, Protocol):
    """A copy from the host under way."""

    def times(self) -> CopyTimes:
        """Return its start and end, after waiting for the copy's real end."""


class HostStore(Protocol):
    """The host side of one group of storages; it is kept and reused from step to step."""

    def reserve(self, num_bytes: int) -> None:
        """Make room for `num_bytes` in all, or raise OSError before anything is copied."""
        ...

    def write(self, spans: Sequence[Span]) -> Ticket:
        """Copy storages out; they may be freed once the ticket is done."""
        ...

    def read(self, spans: Sequence[Span]) -> ReturnTicket:
        """Bring storages back in size and content in the background; they may be used after the ticket's wait."""
        ...

    def close(self) -> None: ...


class FileStore:
    """An unlinked temporary file: its pages belong to the system's cache, not to this process."""

    def __init__(self, directory: Path):
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise OSError(
                error.errno,
                f"training state can't be swapped to {directory} ({os.strerror(error.errno or 0)}); point "
                "reshard.swap_dir at a folder that can be written, or set reshard.swap to never where memory allows it",
            ) from error
        self._directory = directory
        self._num_bytes = 0

    def reserve(self, num_bytes: int) -> None:
        if num_bytes <= self._num_bytes:
            return
        try:
            os.posix_fallocate(self._file.fileno(), 0, num_bytes)
        except OSError as error:
            raise self._explained(error, num_bytes) from error
        self._num_bytes = num_bytes

    def write(self, spans: Sequence[Span]) -> Ticket:
        for span in spans:
            rest = _memory_of(span)
            while rest:
                try:
                    written = os.pwrite(self._file.fileno(), rest, span.offset + span.num_bytes - len(rest))
                except OSError as error:
                    raise self._explained(error, self._num_bytes) from error
                rest = rest[written:]
        return _Done()

    def read(self, spans: Sequence[Span]) -> ReturnTicket:
        return _ReadingThread(self._file.fileno(), spans)

    def close(self) -> None:
        self._file.close()

    def _explained(self, error: OSError, num_bytes: int) -> OSError:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return error
        return OSError(
            error.errno,
            f"no room in {self._directory} for {num_bytes} bytes of swapped training state "
            f"({os.strerror(error.errno)}); free as much there, point reshard.swap_dir at a larger disk, or set "
            "reshard.swap to never where memory allows it",
        )


class _Done:
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        return


class NoStore:
    """Host side of tensors that never leave the device."""

    def reserve(self, num_bytes: int) -> None:
        assert num_bytes == 0, num_bytes

    def write(self, spans: Sequence[Span]) -> Ticket:
        assert not spans, spans
        return _Done()

    def read(self, spans: Sequence[Span]) -> ReturnTicket:
        assert not spans, spans
        return _NothingToRead()

    def close(self) -> None:
        return


class _NothingToRead(_Done):
    def __init__(self) -> None:
        self._now = time.perf_counter()

    def times(self) -> CopyTimes:
        return CopyTimes(self._now, self._now)


class _ReadingThread:
    """Thread that fills storages from a file; reads release the interpreter lock, so that other stages compute
    meanwhile."""

    def __init__(self, file: int, spans: Sequence[Span]):
        self._file = file
        self._spans = spans
        self._error: BaseException | None = None
        self._start = self._end = time.perf_counter()
        self._thread = threading.Thread(target=self._run, name="swap-return")
        self._thread.start()

    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def times(self) -> CopyTimes:
        return CopyTimes(self._start, self._end)

    def _run(self) -> None:
        try:
            for span in self._spans:
                span.storage.resize_(span.num_bytes)
                self._fill(span)
        except BaseException as error:  # Raised again by wait, in the thread that waits.
            self._error = error
        self._end = time.perf_counter()

    def _fill(self, span: Span) -> None:
        rest = _memory_of(span)
        while rest:
            count = os.preadv(self._file, [rest], span.offset + span.num_bytes - len(rest))
            if count == 0:
                raise OSError(errno.EIO, f"the swap file ends {len(rest)} bytes before its time")
            rest = rest[count:]


def _memory_of(span: Span) -> memoryview:
    assert span.storage.nbytes() == span.num_bytes, (span.storage.nbytes(), span.num_bytes)
    # Not through numpy: a storage lent to it can no longer be freed in place.
    return memoryview((ctypes.c_char * span.num_bytes).from_address(span.storage.data_ptr())).cast("B")
