"""The catalogue of a batch: what is true of a row whatever the worker state, observed once for all controllers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spmdrl.dataflow.samples.control.row_news import News, RowDrop, RowMetadata
from spmdrl.dataflow.samples.schema import columns_mask, length_column, names_of_mask
from spmdrl.types import Integers

_NOT_DROPPED = -1
_NO_HOME = -1
# Lengths travel two in a word.
_LONGEST_ROW = (1 << 31) - 1


class Catalogue:
    """Homes, columns, lengths and drops of rows; row r belongs to group r // group_size, which has one home.

    Its content is a function of the news that it observed, not of their order.
    """

    def __init__(self, num_rows: int, group_size: int = 1):
        if group_size < 1 or num_rows % group_size:
            raise ValueError(f"{num_rows} rows don't divide into groups of {group_size}; use a multiple of it")
        self.num_rows = num_rows
        self.group_size = group_size
        self.version = 0
        """changes whenever news come in, so that answers can be kept until then"""
        self.homes: Integers = np.full(num_rows, _NO_HOME, dtype=np.int64)
        self.columns: Integers = np.zeros(num_rows, dtype=np.int64)
        """a mask of schema bits a row"""
        self._lengths: dict[str, Integers] = {}
        self._reasons: list[str] = []
        self._reason: Integers = np.full(num_rows, _NOT_DROPPED, dtype=np.int64)

    def observe(self, entry: News) -> None:
        """Record columns or drops. Raises ValueError, and records nothing, for news that contradict each other."""
        if isinstance(entry, RowDrop):
            self.drop(entry.rows, entry.reason)
        elif isinstance(entry, RowMetadata):
            self._add_columns(entry)
        else:
            raise ValueError(
                f"{entry.rows.size} places of rows were announced to all ranks; they are for their node only"
            )

    def drop(self, rows: ArrayLike, reason: str) -> None:
        """Take rows out of play for good. Of several reasons the first in the alphabet stays."""
        index = self._within(rows)
        if reason not in self._reasons:
            self._reasons.append(reason)
        # The last entry stands for rows that weren't dropped before: it is what _NOT_DROPPED picks.
        gives_way = np.array([reason < known for known in self._reasons] + [True])
        self._reason[index[gives_way[self._reason[index]]]] = self._reasons.index(reason)
        self.version += 1

    @property
    def is_dropped(self) -> NDArray[np.bool_]:
        """Whether each row was dropped [num_rows]."""
        return self._reason != _NOT_DROPPED

    @property
    def has_home(self) -> NDArray[np.bool_]:
        """Whether each row exists yet [num_rows]."""
        return self.homes != _NO_HOME

    def lengths(self, name: str) -> Integers:
        """Row lengths [num_rows] of a ragged column, -1 where it isn't there yet."""
        present = (self.columns & columns_mask([name])) != 0
        return np.where(present, self._lengths_of(length_column(name)), -1)

    def num_dropped(self, rows: Integers) -> dict[str, int]:
        """How many of these dropped rows were dropped for which reason."""
        counts = np.bincount(self._reason[rows], minlength=len(self._reasons)).tolist()
        return {reason: count for reason, count in sorted(zip(self._reasons, counts, strict=True)) if count}

    def rows_by_reason(self) -> Mapping[str, Integers]:
        """The rows that were dropped for each reason."""
        return {reason: np.flatnonzero(self._reason == code) for code, reason in enumerate(self._reasons)}

    def checked(self, rows: ArrayLike) -> Integers:
        """Row numbers as an array. Raises ValueError for one outside of the batch, or named twice."""
        index = self._within(rows)
        twice = self._named_twice(index)
        if twice is not None:
            raise ValueError(f"row {twice} is named twice among {index.size} rows; name each row once")
        return index

    def _within(self, rows: ArrayLike) -> Integers:
        index = np.asarray(rows, dtype=np.int64).reshape(-1)
        if index.size and (index.min() < 0 or index.max() >= self.num_rows):
            raise ValueError(f"rows {index.min()}..{index.max()} lie outside of the batch's 0..{self.num_rows - 1}")
        return index

    def _add_columns(self, metadata: RowMetadata) -> None:
        rows = self._within(metadata.rows)
        if not rows.size:
            return
        self._refuse_repeated(rows, metadata.columns)
        homes = self._homes_with(rows, metadata.homes)
        for name, lengths in metadata.lengths.items():
            if lengths.min() < 0 or lengths.max() > _LONGEST_ROW:
                raise ValueError(f"lengths {lengths.min()}..{lengths.max()} of {name!r} aren't within 0..2^31 - 1")
        self.homes = homes
        self.columns[rows] |= metadata.columns
        for name, lengths in metadata.lengths.items():
            self._lengths_of(name)[rows] = lengths
        self.version += 1

    def _refuse_repeated(self, rows: Integers, columns: int) -> None:
        known = (self.columns[rows] & columns) != 0
        twice = int(rows[known.argmax()]) if known.any() else self._named_twice(rows)
        if twice is not None:
            names = names_of_mask(int(self.columns[twice]) & columns or columns)
            raise ValueError(f"columns {names} of row {twice} are announced twice; one state makes each once")

    def _homes_with(self, rows: Integers, homes: Integers) -> Integers:
        """The homes of all rows once these are there."""
        old = self.homes[rows]
        if np.array_equal(old, homes):
            return self.homes
        moved = (old != _NO_HOME) & (old != homes)
        if moved.any():
            raise ValueError(f"row {rows[moved][0]} moves from warehouse {old[moved][0]}; a home never changes")
        if homes.min() < 0:
            raise ValueError(f"row {rows[homes.argmin()]} can't live in warehouse {homes.min()}; they count from 0")
        after = self.homes.copy()
        after[rows] = homes
        by_group = after.reshape(-1, self.group_size)
        split = ((by_group != by_group.max(axis=1, keepdims=True)) & (by_group != _NO_HOME)).any(axis=1)
        if split.any():
            group = int(split.argmax())
            raise ValueError(
                f"the rows of group {group} live in warehouses {by_group[group].tolist()}; a group has one home"
            )
        return after

    def _lengths_of(self, name: str) -> Integers:
        return self._lengths.setdefault(name, np.zeros(self.num_rows, dtype=np.int64))

    def _named_twice(self, rows: Integers) -> int | None:
        """A row that is named more than once, if there is one."""
        seen = np.zeros(self.num_rows, dtype=np.bool_)
        seen[rows] = True
        if np.count_nonzero(seen) == rows.size:
            return None
        return int(np.bincount(rows).argmax())
