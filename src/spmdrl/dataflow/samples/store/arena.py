"""Which parts of a run of memory are taken: a best-fit allocator over plain integers."""

from __future__ import annotations

import bisect

ALIGNMENT = 64
"""bytes: two places never share a cache line"""


class Arena:
    """The bytes [start, stop), both multiples of 64, cut into taken and free runs; neighbouring free runs are one."""

    def __init__(self, start: int, stop: int):
        assert start % ALIGNMENT == 0 and stop % ALIGNMENT == 0 and start < stop, (start, stop)
        self._begin, self._limit = start, stop
        self._taken: dict[int, int] = {}
        """start -> bytes, as for the free runs below"""
        self._free: dict[int, int] = {}
        self._free_ends: dict[int, int] = {}
        """end -> start"""
        self._by_size: list[tuple[int, int]] = []
        self._peak = start
        self.used_bytes = 0
        self._add_free(start, stop - start)

    def take(self, num_bytes: int) -> int:
        """The start of a free run of `num_bytes`, from the smallest run that is large enough; else a MemoryError."""
        assert num_bytes > 0, num_bytes
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        found = bisect.bisect_left(self._by_size, (size, 0))
        if found == len(self._by_size):
            raise MemoryError(self._full(num_bytes))
        room, start = self._by_size[found]
        self._remove_free(start, room)
        if room > size:
            self._add_free(start + size, room - size)
        self._taken[start] = size
        self.used_bytes += size
        self._peak = max(self._peak, start + size)
        return start

    def give_back(self, start: int) -> None:
        """Free what `take` gave. Raises ValueError for anything else."""
        if start not in self._taken:
            raise ValueError(f"nothing is taken at byte {start}; was it freed before?")
        size = self._taken.pop(start)
        self.used_bytes -= size
        after = self._free.get(start + size)
        if after is not None:
            self._remove_free(start + size, after)
            size += after
        before = self._free_ends.get(start)
        if before is not None:
            self._remove_free(before, start - before)
            size, start = size + start - before, before
        self._add_free(start, size)

    def restart_peak(self) -> int:
        """The highest byte that was taken since the last call; counting starts again from what is taken now."""
        peak = self._peak
        self._peak = max((start + size for start, size in self._taken.items()), default=self._begin)
        return peak

    def _add_free(self, start: int, size: int) -> None:
        self._free[start] = size
        self._free_ends[start + size] = start
        bisect.insort(self._by_size, (size, start))

    def _remove_free(self, start: int, size: int) -> None:
        del self._free[start], self._free_ends[start + size]
        del self._by_size[bisect.bisect_left(self._by_size, (size, start))]

    def _full(self, num_bytes: int) -> str:
        largest = self._by_size[-1][0] if self._by_size else 0
        return (
            f"{num_bytes} bytes of samples find no room: {self.used_bytes} of {self._limit - self._begin} bytes are "
            f"taken, and the largest free run has {largest}; lower the rows of a step, or give the node more memory"
        )
