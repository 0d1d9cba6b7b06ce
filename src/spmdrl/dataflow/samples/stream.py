"""A stream: a state takes its rows as they become ready, while the states before it still work."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from spmdrl.dataflow.samples.balancing.sharing import RowGroups
from spmdrl.dataflow.samples.control.catalogue import Catalogue
from spmdrl.dataflow.samples.control.row_news import News, RowDrop, RowMetadata
from spmdrl.dataflow.samples.schema import columns_mask, names_of_mask, rule_of
from spmdrl.types import Batch, Integers, WorkerState

# How long a waiting reader sleeps between two looks: it grows from the first figure to the second.
_SHORTEST_NAP_SECONDS, _LONGEST_NAP_SECONDS = 50e-6, 2e-3


@dataclass(frozen=True)
class StreamParts:
    """What a stream uses of the batch that it belongs to."""

    read_news: Callable[[], list[News]]
    """what was announced since the last call on the nodes where the rows live"""
    fetch: Callable[[Integers], Batch]
    owner: Callable[[WorkerState, int], int | None]
    """the rank that took a row for a state"""
    timeout_seconds: float
    groups: RowGroups | None = None
    in_place: bool = False
    """whether all ranks of the group read the rows where they are, so that only their numbers must be shared"""


class Stream:
    """The rows of one state that were dealt to this rank. Which rows these are never depends on timing.

    Where ranks work on the same rows, all of them call `take` alike: the first decides, and shares.
    """

    def __init__(self, state: WorkerState, rows: Integers, needs: frozenset[str], known: Catalogue, parts: StreamParts):
        """`known` is what all ranks have at the start; the stream adds news to a copy."""
        self.state = state
        self.taken: Integers = np.empty(0, dtype=np.int64)
        self._left = rows
        self._is_gone = np.zeros(known.num_rows, dtype=bool)
        """taken or dropped"""
        self._needs = columns_mask(needs)
        self._columns = known.columns.copy()
        self._lengths = {name: known.lengths(name).clip(min=0) for name in ("prompt_ids", "response_ids")}
        self._parts = parts

    def num_ready(self) -> int:
        """How many of this rank's rows could be taken now. Never waits."""
        self._read_news()
        return int(self._ready().sum())

    def take(self, max_rows: int | None = None, max_tokens: int | None = None) -> Batch:
        """The next rows, ascending: at least one, at most so many; waits for the first. No row when all were taken.

        A row longer than `max_tokens` comes alone. If no row becomes ready within the deadline, a TimeoutError names
        rows, missing columns and who makes them.
        """
        groups = self._parts.groups
        if groups is None:
            return self._parts.fetch(self._next(max_rows, max_tokens))
        batch = None
        if groups.is_leader:
            rows = self._next(max_rows, max_tokens)
            batch = Batch(torch.from_numpy(rows)) if self._parts.in_place else self._parts.fetch(rows)
        batch = groups.share(batch)
        if not groups.is_leader:
            self._mark_taken(batch.rows.numpy())
        return self._parts.fetch(batch.rows.numpy()) if self._parts.in_place else batch

    def lengths(self, name: str) -> Integers:
        """Row lengths [num_rows] of prompts or responses, as far as they are known here; 0 where they aren't."""
        return self._lengths[name]

    def close(self) -> None:
        """End the stream. Raises RuntimeError if rows were neither taken nor dropped."""
        self._read_news()
        if self._left.size:
            raise RuntimeError(
                f"{self.state.value} closes its stream with {self._left.size} rows left ({_listed(self._left)}); "
                "take until an empty batch comes"
            )

    def _next(self, max_rows: int | None, max_tokens: int | None) -> Integers:
        started, nap = time.monotonic(), _SHORTEST_NAP_SECONDS
        while True:
            self._read_news()
            ready = self._left[self._ready()]
            if ready.size or not self._left.size:
                break
            if time.monotonic() - started > self._parts.timeout_seconds:
                raise TimeoutError(self._reason())
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_SECONDS)
        rows = self._within_budget(ready[:max_rows], max_tokens)
        self._mark_taken(rows)
        return rows

    def _within_budget(self, rows: Integers, max_tokens: int | None) -> Integers:
        if max_tokens is None or not rows.size:
            return rows
        tokens = sum(lengths[rows] for lengths in self._lengths.values())
        return rows[: max(1, int(np.searchsorted(np.cumsum(tokens), max_tokens, side="right")))]

    def _mark_taken(self, rows: Integers) -> None:
        self.taken = np.concatenate([self.taken, rows])
        self._is_gone[rows] = True
        self._left = self._left[~self._is_gone[self._left]]

    def _ready(self) -> NDArray[np.bool_]:
        return (self._columns[self._left] & self._needs) == self._needs

    def _read_news(self) -> None:
        for entry in self._parts.read_news():
            if isinstance(entry, RowMetadata):
                self._columns[entry.rows] |= entry.columns
                for name in self._lengths.keys() & entry.lengths.keys():
                    self._lengths[name][entry.rows] = entry.lengths[name]
            elif isinstance(entry, RowDrop):
                self._is_gone[entry.rows] = True
                self._left = self._left[~self._is_gone[self._left]]

    def _reason(self) -> str:
        """What is waited for: rows, columns, and the ranks that make them."""
        waits = []
        lacking = self._needs & ~self._columns[self._left]
        for mask in np.unique(lacking).tolist():
            rows = self._left[lacking == mask]
            for name in names_of_mask(mask):
                waits.append(f"{name} of {_listed(rows)}, from {self._makers(name, rows)}")
        return (
            f"{self.state.value} waited {self._parts.timeout_seconds:g} s (dock.timeout_seconds) for "
            f"{'; '.join(waits)}; that rank hangs or is slow: look at its log, or raise the limit"
        )

    def _makers(self, name: str, rows: Integers) -> str:
        state = rule_of(name).made_by
        if state is None:
            return "the rank that puts the prompts"
        ranks = {self._parts.owner(state, row) for row in rows.tolist()}
        known = sorted(rank for rank in ranks if rank is not None)
        return f"{state.value} on {'rank' if len(known) == 1 else 'ranks'} {', '.join(map(str, known)) or 'unknown'}"


def _listed(rows: Sequence[int] | Integers) -> str:
    shown = ", ".join(map(str, list(rows)[:4]))
    return f"row {shown}" if len(rows) == 1 else f"rows {shown}{' and more' if len(rows) > 4 else ''} ({len(rows)})"
