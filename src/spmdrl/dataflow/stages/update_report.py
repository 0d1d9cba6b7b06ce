"""What is reported of the rows of an update: how far generator and trainer differ, how old tokens are, a few in full.

All rows go to a record, by which a row that is generated again can be compared.

Shape letters: `R` packed response tokens of some rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from spmdrl.nouns.batch import Batch, Integers
from spmdrl.observability.metrics import Recorder
from spmdrl.resources.collectives import gather_ragged_columns
from spmdrl.resources.device import to_host

ROW = "row"
"""A column for one update: the row of each response token."""
OTHERS = 4
"""Rows of other prompts beside a whole group, where no number of rows is set."""


def mismatch(
    old_logprobs_R: Tensor, columns: Mapping[str, Tensor], version: int
) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """How far the generator's log-probs lie from the trainer's: (sum, count) by name, and maxima.

    Of tokens that these very weights generated: for others a difference is no mismatch of two engines.
    """
    is_own_R = columns["versions"] == version
    difference_R = (columns["rollout_logprobs"] - old_logprobs_R).where(is_own_R, 0.0)
    distance_R = difference_R.abs()
    count = is_own_R.sum()
    # Below every distance: what is reported of no tokens at all.
    nothing = distance_R.new_full((1,), -torch.inf)
    furthest = torch.cat((nothing, distance_R.where(is_own_R, -torch.inf))).max()
    means = {"mismatch/kl": (difference_R.sum(), count), "mismatch/abs_mean": (distance_R.sum(), count)}
    return means, {"mismatch/abs_max": furthest}


def record_lags(recorder: Recorder, versions_R: Tensor, version: int) -> None:
    """Record by how many policy versions these tokens, which no other rank records, lag behind this one."""
    lags_R = version - versions_R
    if not lags_R.numel():
        return
    recorder.mean("off_policy/mean", float(lags_R.double().mean()), lags_R.numel())
    recorder.maximum("off_policy/max", float(lags_R.max()))
    lags, counts = lags_R.unique(return_counts=True)
    for lag, count in zip(lags.tolist(), counts.tolist(), strict=True):
        recorder.total(f"off_policy/lag_{lag}", count)


def chosen_places(num_rows: int, wanted: int | None, group_size: int) -> list[int]:
    """The first group's places, responses to one prompt to be compared; then others, spread evenly."""
    wanted = min(group_size + OTHERS if wanted is None else wanted, num_rows)
    beside = min(group_size, wanted)
    spread = [beside + number * (num_rows - beside) // (wanted - beside) for number in range(wanted - beside)]
    return [*range(beside), *spread]


class RowsRecord(Protocol):
    """Keeps what a step makes of the rows of this rank; on the host."""

    def rewarded(self, rows: Tensor, rewards_B: Tensor) -> None:
        """Called with the rewards of all rows of the step, ascending, before advantages are made."""
        ...

    def taken(self, batch: Batch) -> None:
        """Called with the rows that this rank trains on, before the first update."""
        ...

    def trained(self, row_R: Tensor, logprobs_R: Tensor, loss_R: Tensor) -> None:
        """Called after the updates: each token's row, the trainer's log-prob before them, and its term of the loss."""
        ...


class ShownRows:
    """Keeps what the first update of a step finds of a few rows: those of one prompt, and others of all prompts."""

    def __init__(self, wanted: int | None, record: RowsRecord | None = None):
        """`wanted` counts rows; None: all responses to one prompt, and a few others. `record` gets all rows."""
        self._wanted = wanted
        self._record = record
        self._rows = torch.empty(0, dtype=torch.int64)
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []
        self._logprobs: dict[int, list[float]] = {}

    @property
    def rows(self) -> list[int]:
        return self._rows.tolist()

    def begin_step(self, rows: Integers, group_size: int) -> None:
        """Forget the step before, and choose among this one's `rows`, `group_size` consecutive ones per prompt."""
        self._rows = torch.from_numpy(rows[chosen_places(rows.size, self._wanted, group_size)])
        self._kept.clear()
        self._logprobs.clear()

    def take(self, batch: Batch) -> None:
        """Record the rows that this rank trains on."""
        if self._record is not None:
            self._record.taken(batch)

    def add(self, row_R: Tensor, logprobs_R: Tensor, loss_R: Tensor) -> None:
        """Keep the log-probs of tokens and their terms of the loss, on the device, which needn't be waited for."""
        if len(self._rows) or self._record is not None:
            self._kept.append((row_R, logprobs_R, loss_R))

    def gather(self) -> None:
        """Collect what all ranks kept; those with the same rows kept the same. Collective over all ranks."""
        if not len(self._rows) and self._record is None:
            return
        # All tokens are copied: choosing on the device would make the host wait once more.
        row_R, logprobs_R, loss_R = to_host([torch.cat(parts) for parts in zip(*self._kept, strict=True)] or _nothing())
        self._kept.clear()
        if self._record is not None:
            self._record.trained(row_R, logprobs_R, loss_R)
        if not len(self._rows):
            return
        is_shown_R = torch.isin(row_R, self._rows)
        for rows, values in gather_ragged_columns([row_R[is_shown_R], logprobs_R[is_shown_R]]):
            for row in rows.unique().tolist():
                self._logprobs[row] = values[rows == row].tolist()

    def logprobs(self, row: int) -> list[float] | None:
        """The trainer's log-probs of a row's tokens before the update; None where the update left the row out."""
        return self._logprobs.get(row)


def _nothing() -> list[Tensor]:
    """Rows, log-probs and loss of no tokens."""
    return [torch.empty(0, dtype=torch.int64), torch.empty(0), torch.empty(0)]
