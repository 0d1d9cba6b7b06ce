"""A checkpoint that threads write, one per rank, while training goes on.

begun -> written: this rank's files are on the disk -> over: on the main rank, published or failed

No thread takes part in a collective. The main rank's thread finds each rank's report in the job's store, so that a
checkpoint is published as soon as the last file is there, whichever step is running.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from spmdrl.engines.training.checkpoints.checkpoint import CheckpointStore, SaveResult, Written, text_of
from spmdrl.observability.fault_points import faultpoint

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5


class Board(Protocol):
    """Key-value store shared by ranks, such as those of torch.distributed."""

    def set(self, key: str, value: str, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...
    def delete_key(self, key: str, /) -> bool: ...


@dataclass(frozen=True)
class RankOfSave:
    """This rank among those that save together."""

    rank: int
    num_ranks: int
    board: Board


@dataclass(frozen=True)
class EndOfSave:
    """Result of a save, with its time by `time.perf_counter`."""

    result: SaveResult
    time: float


class BackgroundSave:
    """A checkpoint being written."""

    def __init__(
        self, store: CheckpointStore, place: RankOfSave, step: int, aside: Path, *, number: int,
        write: Callable[[], Sequence[Path]], write_last: Callable[[], Sequence[Path]], after: Callable[[], None],
    ):  # fmt: skip
        """Start at once. `number` counts the saves of this process, the same on all ranks.

        `write` writes this rank's files into the folder `aside`; on the main rank, `write_last` writes more once all
        ranks have, and `after` follows the publication.
        """
        self.step = step
        self.end: EndOfSave | None = None
        """on the main rank, set when it is over"""
        self._store = store
        self._place = place
        self._aside = aside
        self._write, self._write_last, self._after = write, write_last, after
        self._keys = [f"checkpoint/{number}/{rank}" for rank in range(place.num_ranks)]
        self._is_written, self._is_over = threading.Event(), threading.Event()
        self._failure: BaseException | None = None
        threading.Thread(target=self._run, name=f"checkpoint-{step}", daemon=True).start()

    def wait_for_files(self, seconds: float | None = None) -> None:
        """Wait until this rank's files are written, at most `seconds`; raises failures other than the disk's."""
        self._is_written.wait(seconds)
        self.check()

    def wait(self, seconds: float | None = None) -> None:
        """On the main rank, wait until it is over, at most `seconds`; raises failures other than the disk's."""
        self._is_over.wait(seconds)
        self.check()

    def check(self) -> None:
        """Raise, on this rank, its thread's failure, except the disk's."""
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            faultpoint("step", self.step)
            self._write_files()
            self._is_written.set()
            if self._store.is_main:
                self.end = EndOfSave(self._publish(), time.perf_counter())
        except BaseException as failure:
            # Raised in the main thread: FolderTaken, or a mistake in a part of the run.
            self._failure = failure
        finally:
            self._is_written.set()
            self._is_over.set()

    def _write_files(self) -> None:
        try:
            written = self._store.describe(self._aside, self._write)
        except BaseException as failure:
            # The main rank needn't wait for this one.
            self._report(Written({}, text_of(failure)))
            raise
        self._report(written)

    def _report(self, written: Written) -> None:
        self._place.board.set(self._keys[self._place.rank], written.to_json())

    def _publish(self) -> SaveResult:
        board, pause = self._place.board, _SHORTEST_PAUSE
        while not board.check(self._keys):
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        reports = [Written.from_json(board.get(key)) for key in self._keys]
        for key in self._keys:
            board.delete_key(key)
        if all(report.error is None for report in reports):
            reports.append(self._store.describe(self._aside, self._write_last))
        result = self._store.publish(self.step, self._aside, reports)
        if result.folder is not None:
            self._after()
        return result
