"""The lives of a batch's rows as arrays that outlast the job, and lives made from such arrays."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from spmdrl.dataflow.samples.control.catalogue import RowMetadata, announced_lengths
from spmdrl.dataflow.samples.control.row_lives import RowLives, RowStatus
from spmdrl.dataflow.samples.schema import RULES, columns_mask, names_of_mask
from spmdrl.nouns.batch import Integers, WorkerState

Arrays = dict[str, NDArray[np.generic]]


def snapshot(lives: RowLives) -> Arrays:
    """The lives as arrays, the same on all ranks between two commits.

    Claims aren't saved, as their holders end with the job. Raises ValueError for a claimed row that has a column of the
    claiming state already: it can't be made again.
    """
    catalogue = lives.catalogue
    _refuse_half_made(lives)
    names = names_of_mask(int(np.bitwise_or.reduce(catalogue.columns, initial=0)))
    reasons = {reason: rows for reason, rows in sorted(catalogue.rows_by_reason().items()) if rows.size}
    out: Arrays = {
        "batch": np.array([lives.step, catalogue.num_rows, catalogue.group_size], dtype=np.int64),
        "has_home": np.ones(catalogue.num_rows, dtype=np.bool_),
        "reasons": np.frombuffer(json.dumps(list(reasons)).encode(), dtype=np.uint8),
    }
    out |= {f"dropped/{number}": rows for number, rows in enumerate(reasons.values())}
    out |= {f"has/{name}": (catalogue.columns & columns_mask([name])) != 0 for name in names}
    out |= {f"lengths/{name}": catalogue.lengths(name) for name in announced_lengths(columns_mask(names))}
    for state, controller in lives.controllers.items():
        out[f"consumed/{state.value}"] = controller.rows_with(RowStatus.CONSUMED)
    return out


def _refuse_half_made(lives: RowLives) -> None:
    for state, controller in lives.controllers.items():
        claimed = controller.rows_with(RowStatus.CLAIMED)
        made = columns_mask(rule.name for rule in RULES if rule.made_by is state)
        half_made = claimed[(lives.catalogue.columns[claimed] & made) != 0]
        if half_made.size:
            raise ValueError(
                f"row {half_made[0]} is claimed for {state.value}, but has its columns already; finish "
                f"{state.value} before saving"
            )


def restored(needs_by_state: Mapping[WorkerState, frozenset[str]], saved: Arrays, homes: Integers) -> RowLives:
    """The lives that `snapshot` saved, with rows in new homes [num_rows].

    Raises ValueError for another set of worker states than the saved one.
    """
    step, _, group_size = saved["batch"].tolist()
    kept = sorted(key.removeprefix("consumed/") for key in saved if key.startswith("consumed/"))
    wanted = sorted(state.value for state in needs_by_state)
    if kept != wanted:
        raise ValueError(f"rows were saved with states {', '.join(kept)}, but the run has {', '.join(wanted)}")
    lives = RowLives(needs_by_state, homes, step=step, group_size=group_size)
    for name in saved_columns(saved):
        rows, columns = np.flatnonzero(saved[f"has/{name}"]), columns_mask([name])
        lengths = {key: saved[f"lengths/{key}"].astype(np.int64)[rows] for key in announced_lengths(columns)}
        lives.observe([RowMetadata(rows, columns, lengths)])
    for number, reason in enumerate(json.loads(saved["reasons"].tobytes())):
        lives.catalogue.drop(saved[f"dropped/{number}"], reason)
    for state in needs_by_state:
        lives.controllers[state].resume(saved[f"consumed/{state.value}"])
    return lives


def saved_columns(saved: Arrays) -> list[str]:
    """The columns that rows had when they were saved."""
    return [key.removeprefix("has/") for key in saved if key.startswith("has/")]
