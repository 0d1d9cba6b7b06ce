"""Lives of a batch's rows: one catalogue and a controller per worker state, the same on every rank.

Nothing here communicates. Ranks that observed the same news and made the same claims agree on every row.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spmdrl.dataflow.samples.catalogue import Catalogue, News, joined
from spmdrl.dataflow.samples.schema import mask_of, names_of_mask
from spmdrl.nouns.batch import Integers, WorkerState

DEFERRED = "deferred"
"""Drop reason of a row that isn't lost, but continues in a later step's batch."""
TRAINED = "trained"


class RowStatus(enum.IntEnum):
    """Status of a row for one worker state; a drop counts once no rank holds the row."""

    WAITING = 0
    CLAIMED = 1
    CONSUMED = 2
    DROPPED = 3


class Controller:
    """Status of all rows for one worker state: absent -> ready -> claimed -> consumed.

    A row dropped while claimed may still be consumed, so that the order of the two announcements doesn't matter.
    """

    def __init__(self, state: WorkerState, needs: frozenset[str], catalogue: Catalogue):
        self.state = state
        self.needs = needs
        self._catalogue = catalogue
        self._needs_mask = mask_of(needs)
        self._held = np.full(catalogue.num_rows, RowStatus.WAITING, dtype=np.int8)
        self._num_changes = 0
        # Cached answers, with their versions of catalogue and claims.
        self._ready: NDArray[np.bool_] = np.zeros(catalogue.num_rows, dtype=np.bool_)
        self._ready_rows: dict[bool, Integers] = {}
        self._answered_at = (-1, -1)

    def ready_rows(self, *, by_group: bool = False) -> Integers:
        """Return claimable rows, ascending; `by_group`: only of groups whose undropped rows are all ready.

        The answer is cached until something changes, and read-only.
        """
        ready = self._is_ready()
        if by_group not in self._ready_rows:
            if by_group:
                # Their groups wait for nothing: all rows are ready, or dropped and not held.
                settled = ready | ((self._held == RowStatus.WAITING) & self._catalogue.is_dropped)
                size = self._catalogue.group_size
                ready = ready & settled.reshape(-1, size).all(axis=1).repeat(size)
            rows = np.flatnonzero(ready)
            rows.flags.writeable = False
            self._ready_rows[by_group] = rows
        return self._ready_rows[by_group]

    def claim(self, rows: ArrayLike) -> None:
        """Move rows ready -> claimed. Raises ValueError, and claims nothing, if a row isn't ready."""
        index = self._catalogue.checked(rows)
        ready = self._is_ready()[index]
        if not ready.all():
            row = int(index[ready.argmin()])
            raise ValueError(f"{self.state.value} can't claim row {row}: it {self.describe(row)}")
        self._hold(index, RowStatus.CLAIMED)

    def consume(self, rows: ArrayLike) -> None:
        """Move rows claimed -> consumed. Raises ValueError, and consumes nothing, if a row wasn't claimed."""
        self._hold(self._claimed(rows), RowStatus.CONSUMED)

    def resume(self, rows: ArrayLike) -> None:
        """Restore a saved controller, which had consumed these rows."""
        self._hold(self._catalogue.checked(rows), RowStatus.CONSUMED)

    def rows_with(self, status: RowStatus) -> Integers:
        """Return rows of this status, ascending."""
        if status is RowStatus.CLAIMED or status is RowStatus.CONSUMED:
            return np.flatnonzero(self._held == int(status))
        is_free, is_dropped = self._held == int(RowStatus.WAITING), self._catalogue.is_dropped
        return np.flatnonzero(is_free & is_dropped if status is RowStatus.DROPPED else is_free & ~is_dropped)

    def status(self, row: int) -> RowStatus:
        held = RowStatus(self._held[row])
        is_out = held is RowStatus.WAITING and self._catalogue.is_dropped[row]
        return RowStatus.DROPPED if is_out else held

    def missing_columns(self, row: int) -> list[str]:
        """Return the columns that this state needs and a row lacks, in schema order."""
        return names_of_mask(self._needs_mask & ~int(self._catalogue.columns[row]))

    def describe(self, row: int) -> str:
        """Describe a row's status for this state, to follow 'row 5 ' in a message."""
        status = self.status(row)
        if status is not RowStatus.WAITING:
            return f"is {status.name.lower()} for {self.state.value}"
        lacking = self.missing_columns(row)
        if lacking:
            return f"waits for columns {', '.join(lacking)} before {self.state.value}"
        return f"is ready for {self.state.value}"

    def _is_ready(self) -> NDArray[np.bool_]:
        """Return True for each claimable row [num_rows], recomputed only after changes."""
        now = (self._catalogue.version, self._num_changes)
        if now != self._answered_at:
            complete = (self._catalogue.columns & self._needs_mask) == self._needs_mask
            self._ready = complete & ~self._catalogue.is_dropped & (self._held == RowStatus.WAITING)
            self._ready_rows.clear()
            self._answered_at = now
        return self._ready

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


@dataclass(frozen=True)
class Accounting:
    """Outcome of a batch's rows; every row is in exactly one place."""

    step: int
    num_trained: int
    num_dropped: Mapping[str, int]
    """Rows by the reason of their drop."""
    num_deferred: int
    """Rows that continue in a later step."""
    num_pending: int
    fates: tuple[str, ...] = ()
    """Outcome of each row, once all are settled: trained, the reason of its drop, or deferred."""


class RowLives:
    """Status of every row of a step's batch for every worker state, without communication.

    A row that the update consumed stays trained; any other dropped row is dropped, or deferred if that is the reason;
    the rest is pending.
    """

    def __init__(
        self, needs_by_state: Mapping[WorkerState, frozenset[str]], homes: Integers, *, step: int, group_size: int = 1
    ):
        """`homes` [num_rows]: the warehouse of each row, which is the same for all rows of a group."""
        self.step = step
        self.catalogue = Catalogue(homes, group_size)
        self.controllers = {state: Controller(state, needs, self.catalogue) for state, needs in needs_by_state.items()}

    def observe(self, news: Iterable[News]) -> None:
        """Apply news, in any order. Raises ValueError for contradictory news."""
        for entry in joined(news):
            self.catalogue.observe(entry)

    def claim(self, state: WorkerState, rows: ArrayLike) -> None:
        """Move rows of all takers from ready to claimed. Raises ValueError if one isn't ready."""
        self.controllers[state].claim(rows)

    def finish(self, state: WorkerState) -> None:
        """Move all rows that are claimed for `state` claimed -> consumed."""
        controller = self.controllers[state]
        controller.consume(controller.rows_with(RowStatus.CLAIMED))

    def trained_rows(self) -> Integers:
        return self.controllers[WorkerState.UPDATE].rows_with(RowStatus.CONSUMED)

    def dropped_rows(self) -> Integers:
        is_dropped = self.catalogue.is_dropped
        is_dropped[self.trained_rows()] = False
        is_dropped[self.deferred_rows()] = False
        return np.flatnonzero(is_dropped)

    def deferred_rows(self) -> Integers:
        """Return the rows that continue in a later step, ascending."""
        deferred = self.catalogue.rows_by_reason().get(DEFERRED, np.empty(0, dtype=np.int64))
        return deferred[~np.isin(deferred, self.trained_rows())]

    def pending_rows(self) -> Integers:
        """Return the rows that are neither trained, dropped nor deferred, ascending."""
        is_settled = self.catalogue.is_dropped
        is_settled[self.trained_rows()] = True
        return np.flatnonzero(~is_settled)

    def account(self) -> Accounting:
        """Return the present outcome of every row."""
        dropped = self.catalogue.num_dropped(self.dropped_rows())
        return Accounting(
            self.step, self.trained_rows().size, dropped, self.deferred_rows().size, self.pending_rows().size
        )

    def settled(self) -> Accounting:
        """Return the final outcome of every row. Raises RuntimeError if one is pending, with its missing columns."""
        pending = self.pending_rows()
        if pending.size:
            raise RuntimeError(
                f"step {self.step}: {pending.size} of {self.catalogue.num_rows} rows were neither trained nor dropped; "
                f"row {pending[0]} {self.controllers[WorkerState.UPDATE].describe(int(pending[0]))}"
            )
        return replace(self.account(), fates=self._fates())

    def _fates(self) -> tuple[str, ...]:
        fates = np.full(self.catalogue.num_rows, TRAINED, dtype=object)
        for reason, rows in self.catalogue.rows_by_reason().items():
            fates[rows] = reason
        fates[self.trained_rows()] = TRAINED
        return tuple(fates.tolist())
