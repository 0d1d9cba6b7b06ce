"""Where every row of a run is: trained in one step, dropped for one reason, or pending; a part of each checkpoint.

A group is pending from where it is begun, and again where its rows were deferred, until its rows are trained or
dropped. Kept are counts, pending groups and a digest of all that was decided, so that it stays small in long runs.
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
    """The account after a step; groups are named by their places in the run's order of prompts."""

    step: int = 0
    num_begun: int = 0
    """groups that steps have begun so far, the first ones in that order"""
    pending: tuple[int, ...] = ()
    """those of them that a later step goes on with, ascending"""
    num_trained: int = 0
    num_dropped: dict[str, int] = field(default_factory=dict)
    """rows by the reason"""
    num_unknown: int = 0
    """rows of earlier parts of the run, whose checkpoints had no account"""
    digest: str = ""
    """of the fate of every row of every step; the same in two runs where they made the same of all rows"""

    def fault(self, group_size: int) -> str | None:
        """What doesn't add up, or None: each row that was begun is in exactly one place."""
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
        """Enter what became of the step's rows. Raises RuntimeError where a row would be in two places or none."""
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
        """Take the account back. Raises ValueError where it doesn't add up; older checkpoints have none."""
        self._is_known = (folder / FILE).is_file()
        if not self._is_known:
            return
        saved = json.loads((folder / FILE).read_text())
        state = AccountState(**(saved | {"pending": tuple(saved["pending"])}))
        if (fault := state.fault(self._group_size)) is not None:
            raise ValueError(f"{FILE}: {fault}")
        self.state = state

    def _adopt(self, step: int, groups: Sequence[int]) -> None:
        """Begin an account in the middle of a run: groups before the next new one are pending or were settled."""
        self._is_known = True
        new = max(groups, default=-1) + 1
        while new and new - 1 in groups:
            new -= 1
        pending = tuple(group for group in groups if group < new)
        num_settled = new - len(pending)
        self.state = AccountState(step - 1, new, pending, num_unknown=num_settled * self._group_size)
