"""A run's checkpoints: written when due, at no cost to earlier ones, with a link to the best."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from spmdrl.engines.training.checkpoints.background_save import BackgroundSave, RankOfSave
from spmdrl.engines.training.checkpoints.checkpoint import CheckpointStore, SaveResult
from spmdrl.engines.training.checkpoints.file_writes import FileWrites, HostCopies, Snapshot, WritesAtOnce, add_text
from spmdrl.job.run.best_checkpoint import LINK, BestStep, best_of, is_due_for_best, point_to, unknown_metric
from spmdrl.job.run.resuming import RUN_FILE, ResumePoint, RunRecord
from spmdrl.job.run.run_logs import RunLogs
from spmdrl.job.run.savable import Savable
from spmdrl.observability.jsonl import JsonlWriter
from spmdrl.observability.log import CHECKPOINTS_FILE
from spmdrl.observability.outage import best_effort
from spmdrl.observability.terminal.units import bytes_text, duration
from spmdrl.resources.collectives import barrier, broadcast_bytes, gather_bytes

# Limit of a failing rank's waiting for a checkpoint; survivors of a killed rank have longer to leave.
_MOST_SECONDS_AT_END = 5.0
# All ranks save in the same order, also over a job's phases, which share a store.
_numbers = itertools.count()


@dataclass(frozen=True)
class SaveEnd:
    """Result of a save, and its duration."""

    result: SaveResult
    seconds: float

    def to_json(self) -> str:
        return json.dumps([self.result.to_json(), self.seconds])

    @classmethod
    def from_json(cls, text: bytes) -> SaveEnd:
        result, seconds = json.loads(text)
        return cls(SaveResult.from_json(result), seconds)


@dataclass(frozen=True)
class _Saving:
    """A save whose result isn't recorded yet."""

    record: RunRecord
    """state of the run in the checkpoint"""
    best_before: tuple[BestStep, ...]
    started: float
    seconds: float
    """time for which training waited"""
    background: BackgroundSave | None


class Checkpoints:
    """Saver of a run's state, which remembers if the last save failed."""

    def __init__(self, store: CheckpointStore, state: Savable, logs: RunLogs, point: ResumePoint | None):
        """`state` is saved in checkpoints. The best steps are those up to `point`: later ones will be repeated."""
        self.store = store
        self.newest = point.folder if point else None
        """folder of the newest checkpoint"""
        self._state = state
        self._logs = logs
        self.best = best_of(store.config, point.record.best if point else (), 0, {})
        """steps that are kept for their values, best first"""
        self._is_best_unknown = False
        """true once a note said that no step has the metric of `checkpoint.best`"""
        self._failed_save: tuple[int, str] | None = None
        """the last checkpoint's step, and the reason for its failure"""
        self._saving: _Saving | None = None
        """the checkpoint that threads are writing"""
        world = logs.world
        self._is_asynchronous = store.config.asynchronous
        self._copies = HostCopies(world.device, num_ranks=world.launch.local_world_size)
        self._place = RankOfSave(world.rank, world.size, world.store)
        self._log: JsonlWriter | None = None
        if logs.world.is_main:
            (store.root / LINK).unlink(missing_ok=True)
            if self.best:
                point_to(self.best[0], store.root)
            if store.config.model_only:
                logs.console.note("checkpoint.model_only: checkpoints hold the model alone; none can be resumed from")
            self._log = JsonlWriter(logs.folder / CHECKPOINTS_FILE)
            self._log.truncate_after(point.record.step if point else -1)

    def is_due(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Return True for a step to save because of its number, or of its metric's value."""
        config = self.store.config
        is_nth = config.interval > 0 and step % config.interval == 0
        return is_nth or is_due_for_best(config, self.best, step, metrics)

    def save(self, record: RunRecord, texts: Mapping[str, str], *, waits: bool) -> None:
        """Write a checkpoint with `texts` by file name; a failure costs none of the earlier ones. Collective.

        With `waits` it is complete on return; otherwise threads may write it, for which `finish` waits. Its metrics are
        those of the next logged step; checkpoints.jsonl has them under its own step.
        """
        started = time.perf_counter()
        self.finish()
        step, config, logs = record.step, self.store.config, self._logs
        before = self.best
        # A step that isn't logged has the previous one's.
        self.best = best_of(config, self.best, step, {} if record.unlogged else record.metrics)
        record = replace(record, best=self.best, is_resumable=not config.model_only)
        write = partial(self._add_writes, record, texts)
        with logs.console.doing(f"saving the checkpoint of step {step}"), logs.timeline.stage("checkpoint", step):
            begun = self._begin(step, write) if self._is_asynchronous and not waits else None
            result = self.store.save(step, lambda folder: _at_once(write, folder)) if begun is None else None
        seconds = time.perf_counter() - started
        logs.recorder.maximum("checkpoint/seconds", seconds)
        self._saving = _Saving(record, before, started, seconds, begun)
        if result is not None:
            self._settle(SaveEnd(result, seconds))

    def _add_writes(self, record: RunRecord, texts: Mapping[str, str], folder: Path, writes: FileWrites) -> None:
        self._state.write_to(folder, writes)
        if self._logs.world.is_main:
            for name, content in ({RUN_FILE: record.to_json()} | dict(texts)).items():
                add_text(writes, folder / name, content)

    def _begin(self, step: int, write: Callable[[Path, FileWrites], None]) -> BackgroundSave | None:
        """Copy the checkpoint's content, and write it by a thread; None if a rank has no memory for its copies.

        Collective.
        """
        aside, error = self.store.begin(step)
        if error is not None:
            return None
        snapshot, problem = Snapshot(self._copies), ""
        try:
            write(aside, snapshot)
            snapshot.complete()
        except (MemoryError, RuntimeError) as failure:
            problem = f"{type(failure).__name__}: {failure}"
        problems = [one.decode() for one in gather_bytes(problem.encode()) if one]
        if problems:
            self._is_asynchronous = False
            self._copies = HostCopies(self._copies.device, num_ranks=self._copies.num_ranks)
            reason = f"as there is no memory for copies of them ({problems[0]})"
            self._logs.console.note(f"training waits for checkpoints from here on, {reason}")
            return None
        return BackgroundSave(
            self.store, self._place, step, aside, number=next(_numbers),
            write=snapshot.write, write_last=snapshot.write_following, after=partial(self._tidy, step, self.best),
        )  # fmt: skip

    def _tidy(self, step: int, best: tuple[BestStep, ...]) -> None:
        """After a checkpoint, point the link at the best one; then delete others. On the main rank."""
        if best and best[0].step == step:
            with best_effort(f"the link {LINK}"):
                point_to(best[0], self.store.root)
        self.store.forget_old(step, kept=[one.step for one in best])

    def take_end(self) -> bytes:
        """Return the finished save's result on the main rank, for `settle` on all ranks.

        Raises the exception of this rank's thread, unless it is a failure of the disk.
        """
        saving = self._saving
        if saving is None or saving.background is None:
            return b""
        saving.background.check()
        if (end := saving.background.end) is None:
            return b""
        return SaveEnd(end.result, end.time - saving.started).to_json().encode()

    def settle(self, end: bytes) -> None:
        """Record the main rank's result on every rank; nothing if it is empty."""
        if end:
            self._settle(SaveEnd.from_json(end))

    def finish(self) -> None:
        """Wait until the running save has succeeded or failed. Collective."""
        if self._saving is None:
            return
        background = self._saving.background
        assert background is not None
        with self._logs.timeline.stage("checkpoint", self._saving.record.step):
            background.wait_for_files()
            # Finished ranks wait here, so that a hanging rank can be identified.
            barrier()
            if self._logs.world.is_main:
                background.wait()
            end = broadcast_bytes(self.take_end() if self._logs.world.is_main else None)
        self.settle(end)

    def finish_alone(self) -> None:
        """Give a running save some seconds when the run fails. Doesn't communicate."""
        background = None if self._saving is None else self._saving.background
        if background is None:
            return
        # The run ends for another reason.
        with suppress(Exception):
            if self._logs.world.is_main:
                background.wait(_MOST_SECONDS_AT_END)
                self.settle(self.take_end())
            else:
                background.wait_for_files(_MOST_SECONDS_AT_END)

    def _settle(self, end: SaveEnd) -> None:
        saving, self._saving = self._saving, None
        assert saving is not None
        step, result, logs = saving.record.step, end.result, self._logs
        if self._log is not None:
            name = result.folder.name if result.folder else None
            self._log.write({
                "step": step, "seconds": saving.seconds, "write_seconds": end.seconds, "bytes": result.num_bytes,
                "folder": name, "error": result.error,
            })  # fmt: skip
        logs.recorder.maximum("checkpoint/write_seconds", end.seconds)
        if result.folder is None:
            self._failed_save, self.best = (step, str(result.error)), saving.best_before
            logs.recorder.maximum("checkpoint/failed", 1.0)
            logs.console.note(f"WARNING: checkpoint of step {step} FAILED, the run goes on without it: {result.error}")
            return
        logs.recorder.maximum("checkpoint/bytes", float(result.num_bytes))
        size = bytes_text(result.num_bytes)
        logs.console.note(f"checkpoint of step {step}: {size} in {duration(end.seconds)}, {result.folder}")
        self.newest, self._failed_save = result.folder, None
        if saving.background is None and logs.world.is_main:
            self._tidy(step, saving.record.best)
        self._note_best(saving.record)

    @property
    def problem(self) -> str | None:
        """Reason why the last checkpoint is missing; None if it isn't."""
        if self._failed_save is None:
            return None
        step, reason = self._failed_save
        return f"the checkpoint of step {step}, the last one, could not be written ({reason})"

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def _note_best(self, record: RunRecord) -> None:
        """Report if the new checkpoint is among the best."""
        config, logs, step = self.store.config, self._logs, record.step
        for place, one in enumerate(record.best, 1):
            if one.step == step:
                which = f"the best so far, kept as {LINK}" if place == 1 else f"number {place} of the best, kept"
                logs.console.note(f"{one.metric} {one.value:.6g} of step {step} is {which}")
        if config.best_metric is not None and not record.best and not self._is_best_unknown:
            warning = unknown_metric(config.best_metric, record.metrics)
            self._is_best_unknown = warning is not None
            if warning is not None:
                logs.console.note(warning)


def _at_once(write: Callable[[Path, FileWrites], None], folder: Path) -> list[Path]:
    writes = WritesAtOnce()
    write(folder, writes)
    return writes.paths
