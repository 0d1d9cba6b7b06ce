"""Controllers: one per worker state inside every rank, replicated by feeding all of them the same metadata.

A controller is a deterministic state machine: it doesn't communicate, and two controllers that observed
the same metadata and made the same claims agree on every row, in every rank.
"""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spmdrl.dataflow.samples.control.catalogue import Catalogue
from spmdrl.dataflow.samples.schema import columns_mask, names_of_mask
from spmdrl.types import Integers, WorkerState


class RowStatus(enum.IntEnum):
    """Where a row stands for one worker state; a drop counts once no rank holds the row."""

    WAITING = 0
    CLAIMED = 1
    CONSUMED = 2
    DROPPED = 3


class Controller:
    """Tracks, for one worker state, which rows are usable: absent -> ready -> claimed -> consumed.

    A row that is dropped while it is claimed may still be consumed, so that it makes no difference which of the two is
    announced first.
    """

    def __init__(self, state: WorkerState, needs: frozenset[str], catalogue: Catalogue):
        self.state = state
        self.needs = needs
        self._catalogue = catalogue
        self._needs_mask = columns_mask(needs)
        self._held = np.full(catalogue.num_rows, RowStatus.WAITING, dtype=np.int8)
        self._num_changes = 0
        # Answers, and the versions of catalogue and claims of which they are true.
        self._ready: NDArray[np.bool_] = np.zeros(catalogue.num_rows, dtype=np.bool_)
        self._ready_rows: dict[bool, Integers] = {}
        self._answered_at = (-1, -1)

    def ready_rows(self, *, by_group: bool = False) -> Integers:
        """Rows that may be claimed, ascending; `by_group`: only of groups whose undropped rows are all ready.

        The answer is kept until something changes, and can't be written to.
        """
        ready = self._is_ready()
        if by_group not in self._ready_rows:
            rows = np.flatnonzero(ready & self._settled_groups(ready) if by_group else ready)
            rows.flags.writeable = False
            self._ready_rows[by_group] = rows
        return self._ready_rows[by_group]

    def claim(self, rows: ArrayLike) -> None:
        """ready -> claimed. Raises ValueError, and claims nothing, if a row isn't ready."""
        index = self._catalogue.checked(rows)
        ready = self._is_ready()[index]
        if not ready.all():
            row = int(index[ready.argmin()])
            raise ValueError(f"{self.state.value} can't claim row {row}: it {self.describe(row)}")
        self._hold(index, RowStatus.CLAIMED)

    def consume(self, rows: ArrayLike) -> None:
        """claimed -> consumed. Raises ValueError, and consumes nothing, if a row wasn't claimed."""
        self._hold(self._claimed(rows), RowStatus.CONSUMED)

    def resume(self, rows: ArrayLike) -> None:
        """Start where a saved controller stood, which had consumed these rows."""
        self._hold(self._catalogue.checked(rows), RowStatus.CONSUMED)

    def rows_with(self, status: RowStatus) -> Integers:
        """Rows of this status, ascending."""
        if status is RowStatus.CLAIMED or status is RowStatus.CONSUMED:
            return np.flatnonzero(self._held == int(status))
        is_free, is_dropped = self._held == int(RowStatus.WAITING), self._catalogue.is_dropped
        return np.flatnonzero(is_free & is_dropped if status is RowStatus.DROPPED else is_free & ~is_dropped)

    def status(self, row: int) -> RowStatus:
        held = RowStatus(self._held[row])
        is_out = held is RowStatus.WAITING and self._catalogue.is_dropped[row]
        return RowStatus.DROPPED if is_out else held

    def missing_columns(self, row: int) -> list[str]:
        """What this state needs of a row and isn't there yet, in schema order."""
        return names_of_mask(self._needs_mask & ~int(self._catalogue.columns[row]))

    def describe(self, row: int) -> str:
        """Where a row stands for this state, to follow 'row 5 ' in a message."""
        status = self.status(row)
        if status is not RowStatus.WAITING:
            return f"is {status.name.lower()} for {self.state.value}"
        lacking = self.missing_columns(row)
        if lacking:
            return f"waits for columns {', '.join(lacking)} before {self.state.value}"
        return f"is ready for {self.state.value}" if self._catalogue.homes[row] >= 0 else "has no home yet"

    def _is_ready(self) -> NDArray[np.bool_]:
        """Whether each row may be claimed [num_rows], worked out anew only if something has changed."""
        now = (self._catalogue.version, self._num_changes)
        if now != self._answered_at:
            columns = self._catalogue.columns
            # A row without a home doesn't exist yet, even for a state that needs no column.
            exists = self._catalogue.has_home & ~self._catalogue.is_dropped
            complete = (columns & self._needs_mask) == self._needs_mask
            self._ready = complete & exists & (self._held == RowStatus.WAITING)
            self._ready_rows.clear()
            self._answered_at = now
        return self._ready

    def _settled_groups(self, ready: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Whether each row's group waits for nothing more: its rows are ready, or dropped and held by no rank."""
        settled = ready | ((self._held == RowStatus.WAITING) & self._catalogue.is_dropped)
        size = self._catalogue.group_size
        return settled.reshape(-1, size).all(axis=1).repeat(size)

    def _claimed(self, rows: ArrayLike) -> Integers:
        index = self._catalogue.checked(rows)
        claimed = self._held[index] == RowStatus.CLAIMED
        if not claimed.all():
            row = int(index[claimed.argmin()])
            status = self.status(row).name.lower()
            raise ValueError(f"{self.state.value} can't consume row {row}: it is {status}, not claimed")
        return index

    def _hold(self, rows: Integers, status: RowStatus) -> None:
        self._held[rows] = status
        self._num_changes += 1
