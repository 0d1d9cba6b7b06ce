"""Held bytes by owner, on the device and on the host, and the return of freed memory to the system."""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import sys
from typing import Literal, get_args

import torch

from spmdrl.nouns.roles import ROLES
from spmdrl.observability.timeline import HeldMemory

Owner = str
"""One of `OWNERS`."""
Place = Literal["device", "host"]
# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# From Linux's mman.h, and the size on x86-64; with larger huge pages, fewer are filled.
_MADV_HUGEPAGE, _HUGE_PAGE_BYTES = 14, 2 << 20
_LARGE_BLOCK_BYTES = 8 << 20
OWNERS: tuple[Owner, ...] = (
    *(owner for role in ROLES for owner in (role.weights, role.base, role.optimizer) if owner is not None),
    # For the model that is being updated: one at a time, and no longer than that.
    "gradients",
    "generation_weights",
    "kv_cache",
    "decode_graphs",
    "bucket",
)
PLACES: tuple[Place, ...] = get_args(Place)
# Messages of allocators, beside torch's own type: the CPU's, CUDA's and NPU's runtimes, cuBLAS, NumPy.
_WORDS = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED", "Unable to allocate")


class MemoryLedger:
    """Bytes by owner and place, reported by allocating and freeing code; its peaks are of device bytes."""

    def __init__(self) -> None:
        self._bytes: dict[tuple[Owner, Place], int] = {(owner, place): 0 for owner in OWNERS for place in PLACES}
        self._peaks: dict[str, int] = dict.fromkeys(OWNERS, 0)
        self._device_bytes = 0
        self._device_peak = 0

    def set(self, owner: Owner, place: Place, num_bytes: int) -> None:
        """Record that `owner` now holds `num_bytes` at `place`."""
        if (owner, place) not in self._bytes:
            raise ValueError(f"the ledger has no {owner!r} on {place!r}; owners are {OWNERS}, places {PLACES}")
        assert num_bytes >= 0, (owner, place, num_bytes)
        if place == "device":
            self._device_bytes += num_bytes - self._bytes[owner, place]
            self._device_peak = max(self._device_peak, self._device_bytes)
            self._peaks[owner] = max(self._peaks[owner], num_bytes)
        self._bytes[owner, place] = num_bytes

    def bytes_of(self, owner: Owner, place: Place = "device") -> int:
        return self._bytes[owner, place]

    def snapshot(self, stage: str) -> HeldMemory:
        """Freeze present bytes and peaks under the name of the ending stage; peaks restart from here."""
        device: dict[str, int] = {owner: self._bytes[owner, "device"] for owner in OWNERS}
        host: dict[str, int] = {owner: self._bytes[owner, "host"] for owner in OWNERS}
        peaks, peak = self._peaks, self._device_peak
        self._peaks, self._device_peak = device.copy(), self._device_bytes
        return HeldMemory(stage, device, host, peaks, peak)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an allocator's error, rather than one of our own buffers, whose error has a way out already."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    return (isinstance(error, MemoryError) and not text) or any(word in text for word in _WORDS)


def resident_bytes() -> int:
    """Return this process's resident memory; without /proc, its peak."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            return int(status.read().partition("VmHWM:")[2].split(maxsplit=1)[0]) * 1024
    except (OSError, IndexError):
        # getrusage counts KiB, except on macOS, which counts bytes.
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def release_to_system() -> None:
    """Return the allocator's free pages to the operating system; garbage in reference cycles stays."""
    trim = _from_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def return_large_blocks() -> None:
    """Make freed blocks of 8 MiB and more leave the process at once, unless its environment sets the sizes already.

    glibc would keep blocks of up to 32 MiB, in gaps that are too small for the next aligned block of the same size.
    After an update with 16-bit copies of the weights, these gaps amount to as much memory as the copies.
    """
    mallopt = _from_glibc("mallopt")
    if mallopt is None or "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in os.getenv("GLIBC_TUNABLES", ""):
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)
    # The first call ends glibc's own adjustments; this is their final value, and avoids many returns of small blocks.
    mallopt(_M_TRIM_THRESHOLD, 64 << 20)


def ask_for_huge_pages(address: int, num_bytes: int) -> None:
    """Back a large block of new memory by huge pages, if Linux grants them on request.

    Smaller blocks stay in the process when they are freed, and so would their pages.
    """
    madvise = _from_glibc("madvise")
    start = -(-address // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    num_pages = (address + num_bytes - start) // _HUGE_PAGE_BYTES
    if madvise is not None and num_bytes >= _LARGE_BLOCK_BYTES:
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_pages * _HUGE_PAGE_BYTES), _MADV_HUGEPAGE)


@functools.cache
def _from_glibc(name: str) -> ctypes._NamedFuncPointer | None:
    """Return a function that only glibc has, or None with another C library."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
