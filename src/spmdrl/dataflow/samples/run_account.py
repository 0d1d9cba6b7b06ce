"""Account of a run's rows: trained in one step, dropped for one reason, or pending; a part of each checkpoint.

A group is pending from its begin, or from when its rows were deferred, until its rows are trained or dropped. The
account has counts, pending groups and a digest of all decisions, so that it stays small in long runs.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from spmdrl.dataflow.samples.row_lives import DEFERRED, TRAINED, Accounting
from spmdrl.engines.training.checkpoints.file_writes import FileWrites, add_text

FILE = "samples.json"


@dataclass(frozen=True)
class AccountState:
    """Account after a step; groups are numbered in the run's order of prompts."""

    step: int = 0
    num_begun: int = 0
    """number of groups begun so far, the first ones in that order"""
    pending: tuple[int, ...] = ()
    """groups that a later step continues, ascending"""
    num_trained: int = 0
    num_dropped: dict[str, int] = field(default_factory=dict)
    """dropped rows by reason"""
    num_unknown: int = 0
    """rows of earlier parts of the run, whose checkpoints had no account"""
    digest: str = ""
    """digest of the fate of every row of every step; equal in two runs only if all rows fared the same"""

    def fault(self, group_size: int) -> str | None:
        """Describe an inconsistency, or return None: each row that was begun is in exactly one place."""
        num_rows = self.num_begun * group_size
        places = {"trained": self.num_trained, **self.num_dropped, "pending": len(self.pending) * group_size}
        if sum(places.values()) + self.num_unknown != num_rows:
            return f"{num_rows} rows were begun, but there are {places}, and {self.num_unknown} of earlier parts"
        if list(self.pending) != sorted(set(self.pending)) or any(group >= self.num_begun for group in self.pending):
            return f"the pending groups {list(self.pending)} aren't some of the {self.num_begun} that were begun"
        return None


class RunAccount:
    """The account of a run, the same on every rank. open(step) -> close(step) -> open(step + 1)"""

    def __init__(self, group_size: int, *, is_main: bool):
        self.state = AccountState()
        self._group_size = group_size
        self._is_main = is_main
        self._opened: Sequence[int] = ()
        self._is_known = True

    def open(self, step: int, groups: Sequence[int]) -> None:
        """Begin a step with these groups. Raises RuntimeError unless they are the pending ones, then the next ones."""
        if not self._is_known:
            self._adopt(step, groups)
        state = self.state
        expected = [*state.pending, *range(state.num_begun, state.num_begun + len(groups))][: len(groups)]
        if step != state.step + 1 or list(groups) != expected:
            raise RuntimeError(
                f"step {step} begins with groups {list(groups)[:8]}..., but after step {state.step} of the account "
                f"groups {expected[:8]}... are due: rows would be lost or trained twice"
            )
        self._opened = groups

    def close(self, accounting: Accounting) -> Accounting:
        """Record the outcome of the step's rows. Raises RuntimeError if a row is in two places or none."""
        state, size, groups = self.state, self._group_size, self._opened
        fates = [accounting.fates[first : first + size] for first in range(0, len(accounting.fates), size)]
        deferred = {group for group, of_rows in zip(groups, fates, strict=True) if DEFERRED in of_rows}
        counts = Counter(fate for of_rows in fates for fate in of_rows)
        if counts.pop(DEFERRED, 0) != len(deferred) * size:
            raise RuntimeError(f"step {accounting.step}: a group was deferred in part: {counts}, groups {deferred}")
        entry = json.dumps([state.digest, accounting.step, list(groups), accounting.fates])
        now = replace(
            state,
            step=accounting.step,
            num_begun=max([state.num_begun, *(group + 1 for group in groups)]),
            pending=tuple(sorted(set(state.pending) - set(groups) | deferred)),
            num_trained=state.num_trained + counts.pop(TRAINED, 0),
            num_dropped=dict(Counter(state.num_dropped) + counts),
            digest=hashlib.sha256(entry.encode()).hexdigest(),
        )
        if (fault := now.fault(size)) is not None or now.step != state.step + 1:
            raise RuntimeError(f"the rows don't add up after step {accounting.step}: {fault}")
        self.state, self._opened = now, ()
        return accounting

    def write_to(self, folder: Path, writes: FileWrites) -> None:
        """Write the account, after checking it, from the main rank."""
        fault = self.state.fault(self._group_size)
        assert fault is None, fault
        if self._is_main:
            add_text(writes, folder / FILE, json.dumps(asdict(self.state), indent=1, sort_keys=True) + "\n")

    def read_from(self, folder: Path) -> None:
        """Restore the account. Raises ValueError if it is inconsistent; older checkpoints have none."""
        self._is_known = (folder / FILE).is_file()
        if not self._is_known:
            return
        saved = json.loads((folder / FILE).read_text())
        state = AccountState(**(saved | {"pending": tuple(saved["pending"])}))
        if (fault := state.fault(self._group_size)) is not None:
            raise ValueError(f"{FILE}: {fault}")
        self.state = state

    def _adopt(self, step: int, groups: Sequence[int]) -> None:
        """Begin an account in the middle of a run: groups before the next new one are pending or settled."""
        self._is_known = True
        new = max(groups, default=-1) + 1
        while new and new - 1 in groups:
            new -= 1
        pending = tuple(group for group in groups if group < new)
        num_settled = new - len(pending)
        self.state = AccountState(step - 1, new, pending, num_unknown=num_settled * self._group_size)
