"""The lives of a batch's rows: one catalogue and all controllers, decided alike in every rank, saved and restored."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spmdrl.dataflow.samples.control.catalogue import Catalogue
from spmdrl.dataflow.samples.control.controller import Controller, RowStatus
from spmdrl.dataflow.samples.control.row_news import News, RowMetadata, announced_lengths, joined
from spmdrl.dataflow.samples.schema import RULES, columns_mask, names_of_mask
from spmdrl.types import Integers, WorkerState

Arrays = dict[str, NDArray[np.generic]]

DEFERRED = "deferred"
"""What takes a row out of its batch, as a drop does, though it isn't lost: it goes on in the batch of a later step."""


@dataclass(frozen=True)
class Accounting:
    """What became of the rows of a batch; every row is in exactly one place."""

    step: int
    num_trained: int
    num_dropped: Mapping[str, int]
    """Rows by the reason for which they were dropped."""
    num_deferred: int
    """Rows that go on in a later step."""
    num_pending: int


class RowLives:
    """Where every row of a step's batch stands for every worker state. It doesn't communicate.

    A row that the update consumed is trained, and stays so; another one that a rank dropped is dropped, or deferred
    if it was for that reason; the rest is pending.
    """

    def __init__(
        self, needs_by_state: Mapping[WorkerState, frozenset[str]], *, step: int, num_rows: int, group_size: int = 1
    ):
        self.step = step
        self.catalogue = Catalogue(num_rows, group_size)
        self._controllers = {state: Controller(state, needs, self.catalogue) for state, needs in needs_by_state.items()}

    def observe(self, news: Iterable[News]) -> None:
        """Apply news, in any order. Raises ValueError for news that contradict each other."""
        for entry in joined(news):
            self.catalogue.observe(entry)

    def controller(self, state: WorkerState) -> Controller:
        return self._controllers[state]

    def claim(self, state: WorkerState, rows: ArrayLike) -> None:
        """Rows of all takers go ready -> claimed. Raises ValueError if one isn't ready."""
        self._controllers[state].claim(rows)

    def finish(self, state: WorkerState) -> None:
        """All rows that are claimed for `state` go claimed -> consumed."""
        controller = self._controllers[state]
        controller.consume(controller.rows_with(RowStatus.CLAIMED))

    def trained_rows(self) -> Integers:
        return self._controllers[WorkerState.UPDATE].rows_with(RowStatus.CONSUMED)

    def dropped_rows(self) -> Integers:
        is_dropped = self.catalogue.is_dropped
        is_dropped[self.trained_rows()] = False
        is_dropped[self.deferred_rows()] = False
        return np.flatnonzero(is_dropped)

    def deferred_rows(self) -> Integers:
        """Rows that go on in a later step, ascending."""
        deferred = self.catalogue.rows_by_reason().get(DEFERRED, np.empty(0, dtype=np.int64))
        return deferred[~np.isin(deferred, self.trained_rows())]

    def pending_rows(self) -> Integers:
        """Rows that are neither trained, dropped nor deferred, ascending."""
        is_settled = self.catalogue.is_dropped
        is_settled[self.trained_rows()] = True
        return np.flatnonzero(~is_settled)

    def account(self) -> Accounting:
        """Where every row stands now."""
        dropped = self.catalogue.num_dropped(self.dropped_rows())
        return Accounting(
            self.step, self.trained_rows().size, dropped, self.deferred_rows().size, self.pending_rows().size
        )

    def settled(self) -> Accounting:
        """Where every row ended. Raises RuntimeError if one is still pending, with what it waits for."""
        pending = self.pending_rows()
        if pending.size:
            raise RuntimeError(
                f"step {self.step}: {pending.size} of {self.catalogue.num_rows} rows were neither trained nor dropped; "
                f"row {pending[0]} {self._controllers[WorkerState.UPDATE].describe(int(pending[0]))}"
            )
        return self.account()

    def snapshot(self) -> Arrays:
        """All of it as arrays, equal on all ranks between two commits; claims are left out, for their holders go.

        Raises ValueError for a claimed row whose new columns are known already: they can't be made again.
        """
        catalogue = self.catalogue
        self._refuse_half_made()
        names = names_of_mask(int(np.bitwise_or.reduce(catalogue.columns, initial=0)))
        reasons = {reason: rows for reason, rows in sorted(catalogue.rows_by_reason().items()) if rows.size}
        out: Arrays = {
            "batch": np.array([self.step, catalogue.num_rows, catalogue.group_size], dtype=np.int64),
            "has_home": catalogue.has_home,
            "reasons": np.frombuffer(json.dumps(list(reasons)).encode(), dtype=np.uint8),
        }
        out |= {f"dropped/{number}": rows for number, rows in enumerate(reasons.values())}
        out |= {f"has/{name}": (catalogue.columns & columns_mask([name])) != 0 for name in names}
        out |= {f"lengths/{name}": catalogue.lengths(name) for name in announced_lengths(columns_mask(names))}
        for state, controller in self._controllers.items():
            out[f"consumed/{state.value}"] = controller.rows_with(RowStatus.CONSUMED)
        return out

    def _refuse_half_made(self) -> None:
        for state, controller in self._controllers.items():
            claimed = controller.rows_with(RowStatus.CLAIMED)
            made = columns_mask(rule.name for rule in RULES if rule.made_by is state)
            half_made = claimed[(self.catalogue.columns[claimed] & made) != 0]
            if half_made.size:
                raise ValueError(
                    f"row {half_made[0]} is claimed for {state.value}, but has its columns already; finish "
                    f"{state.value} before saving"
                )


def restored(needs_by_state: Mapping[WorkerState, frozenset[str]], saved: Arrays, homes: Integers) -> RowLives:
    """The lives that `snapshot` saved, with rows in new homes [num_rows]; a row that had none has none.

    Raises ValueError for another set of worker states than the saved one.
    """
    step, num_rows, group_size = saved["batch"].tolist()
    kept = sorted(key.removeprefix("consumed/") for key in saved if key.startswith("consumed/"))
    wanted = sorted(state.value for state in needs_by_state)
    if kept != wanted:
        raise ValueError(f"rows were saved with states {', '.join(kept)}, but the run has {', '.join(wanted)}")
    lives = RowLives(needs_by_state, step=step, num_rows=num_rows, group_size=group_size)
    born = np.flatnonzero(saved["has_home"])
    lives.observe([RowMetadata(born, homes[born], 0, {})])
    for key in saved:
        if key.startswith("has/"):
            lives.observe([_saved_column(key.removeprefix("has/"), saved, homes)])
    for number, reason in enumerate(json.loads(saved["reasons"].tobytes())):
        lives.catalogue.drop(saved[f"dropped/{number}"], reason)
    for state in needs_by_state:
        lives.controller(state).resume(saved[f"consumed/{state.value}"])
    return lives


def _saved_column(name: str, saved: Arrays, homes: Integers) -> RowMetadata:
    rows, columns = np.flatnonzero(saved[f"has/{name}"]), columns_mask([name])
    lengths = {name: saved[f"lengths/{name}"].astype(np.int64)[rows] for name in announced_lengths(columns)}
    return RowMetadata(rows, homes[rows], columns, lengths)
