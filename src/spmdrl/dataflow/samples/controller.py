"""Controllers: one per worker state inside every rank, replicated by feeding all of them the same metadata.

A controller is a deterministic state machine: it communicates with nobody, and two controllers that observed
the same metadata and made the same claims agree on every row, in every rank.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spmdrl.dataflow.samples.metadata import Integers, RowMetadata
from spmdrl.dataflow.samples.schema import columns_mask, length_column, names_of_mask
from spmdrl.types import WorkerState


class RowStatus(enum.IntEnum):
    """Where a row stands for one worker state, once its columns are there."""

    WAITING = 0
    CLAIMED = 1
    CONSUMED = 2
    DROPPED = 3


class Controller:
    """Knows, for one worker state, which rows are usable: absent -> ready -> claimed -> consumed; any -> dropped."""

    def __init__(self, state: WorkerState, needs: frozenset[str], *, num_rows: int, group_size: int = 1):
        if num_rows % group_size:
            raise ValueError(f"{num_rows} rows don't divide into groups of {group_size}; use a multiple of it")
        self.state = state
        self.needs = needs
        self.num_rows = num_rows
        self.group_size = group_size
        self.homes: Integers = np.full(num_rows, -1, dtype=np.int64)
        self._needs_mask = columns_mask(needs)
        self._columns: Integers = np.zeros(num_rows, dtype=np.int64)
        self._status: Integers = np.full(num_rows, RowStatus.WAITING, dtype=np.int64)
        self._lengths: dict[str, Integers] = {}

    def observe(self, metadata: RowMetadata) -> None:
        """Learn of columns. News of different columns or rows may come in any order.

        A column announced twice for a row, or a row that changes its home, is a ValueError.
        """
        rows = self._checked(metadata.rows)
        known = (self._columns[rows] & metadata.columns) != 0
        if known.any():
            names = names_of_mask(int(self._columns[rows[known][0]]) & metadata.columns)
            raise ValueError(f"columns {names} of row {rows[known][0]} are announced twice; one state makes each once")
        old_homes = self.homes[rows]
        moved = (old_homes >= 0) & (old_homes != metadata.homes)
        if moved.any():
            raise ValueError(f"row {rows[moved][0]} moves from warehouse {old_homes[moved][0]}; a home never changes")
        self.homes[rows] = metadata.homes
        self._columns[rows] |= metadata.columns
        for name, lengths in metadata.lengths.items():
            self._lengths_of(name)[rows] = lengths

    def ready_rows(self, *, by_group: bool = False) -> Integers:
        """Rows that may be claimed, ascending; `by_group`: only of groups whose undropped rows are all ready."""
        ready = self._is_ready()
        if by_group:
            settled = (ready | (self._status == RowStatus.DROPPED)).reshape(-1, self.group_size)
            ready &= settled.all(axis=1).repeat(self.group_size)
        return np.flatnonzero(ready)

    def claim(self, rows: ArrayLike) -> None:
        """ready -> claimed. Rows that aren't ready are a ValueError, and then nothing is claimed."""
        index = self._checked(rows)
        refused = index[~self._is_ready()[index]]
        if refused.size:
            raise ValueError(f"{self.state.value} can't claim row {refused[0]}: it {self.describe(refused[0])}")
        self._status[index] = RowStatus.CLAIMED

    def consume(self, rows: ArrayLike) -> None:
        """claimed -> consumed. Rows that weren't claimed are a ValueError."""
        index = self._checked(rows)
        refused = index[self._status[index] != RowStatus.CLAIMED]
        if refused.size:
            status = RowStatus(self._status[refused[0]]).name.lower()
            raise ValueError(f"{self.state.value} can't consume row {refused[0]}: it is {status}, not claimed")
        self._status[index] = RowStatus.CONSUMED

    def drop(self, rows: ArrayLike) -> None:
        """Take rows out of play for good, whatever their status."""
        self._status[self._checked(rows)] = RowStatus.DROPPED

    def rows_with(self, status: RowStatus) -> Integers:
        return np.flatnonzero(self._status == status)

    def lengths(self, name: str) -> Integers:
        """Row lengths [num_rows] of a ragged column, -1 where it isn't there yet."""
        present = (self._columns & columns_mask([name])) != 0
        return np.where(present, self._lengths_of(length_column(name)), -1)

    def describe(self, row: int) -> str:
        """Where a row stands for this state, to follow 'row 5 ' in a message."""
        status = RowStatus(self._status[row])
        if status is not RowStatus.WAITING:
            return f"is {status.name.lower()} for {self.state.value}"
        lacking = names_of_mask(self._needs_mask & ~int(self._columns[row]))
        if lacking:
            return f"waits for columns {', '.join(lacking)} before {self.state.value}"
        return f"is ready for {self.state.value}" if self.homes[row] >= 0 else "has no home yet"

    def _lengths_of(self, name: str) -> Integers:
        return self._lengths.setdefault(name, np.zeros(self.num_rows, dtype=np.int64))

    def _is_ready(self) -> NDArray[np.bool_]:
        complete = (self._columns & self._needs_mask) == self._needs_mask
        # A row without a home doesn't exist yet, even for a state that needs no column.
        return complete & (self.homes >= 0) & (self._status == RowStatus.WAITING)

    def _checked(self, rows: ArrayLike | Iterable[int]) -> Integers:
        index = np.asarray(rows, dtype=np.int64).reshape(-1)
        if index.size and (index.min() < 0 or index.max() >= self.num_rows):
            raise ValueError(f"rows {index.min()}..{index.max()} lie outside of the batch's 0..{self.num_rows - 1}")
        if np.unique(index).size != index.size:
            raise ValueError(f"a row is named twice in {index.tolist()[:20]}; name each row once")
        return index
