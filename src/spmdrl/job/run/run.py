"""One run on this rank, from its admission to its outcome: its steps, its record, and how it resumes after a stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NoReturn

from spmdrl.config.reader import ConfigError
from spmdrl.engines.training.checkpoints.manifest import step_of_folder
from spmdrl.job.run.checkpoints import Checkpoints
from spmdrl.job.run.outcome import (
    WARM_START,
    End,
    end_of,
    outcome_of,
    texts_of_checkpoint,
    tracked_run,
    write_early_end,
    write_outcome,
    write_start,
)
from spmdrl.job.run.resuming import Resuming, RunRecord
from spmdrl.job.run.run_folder import on_every_rank
from spmdrl.job.run.run_logs import RunLogs
from spmdrl.job.run.savable import Savable
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.nouns.statistics import Estimate
from spmdrl.observability.fault_points import faultpoint
from spmdrl.observability.health import too_many_skips
from spmdrl.observability.terminal.console import Console
from spmdrl.observability.timeline import Timeline
from spmdrl.resources.collectives import barrier
from spmdrl.resources.world import World
from spmdrl.runtime.supervision.activity import activity
from spmdrl.runtime.supervision.ending import FirstFailure, reason_of_stop
from spmdrl.runtime.supervision.stop_request import Stopped, request

LINES_OF_WARM_START = 20


class Run:
    """Loop over a run's steps. All of its methods are collective.

    made -> resumed: a checkpoint was read, `logs` and `checkpoints` are there -> finished
    """

    logs: RunLogs
    checkpoints: Checkpoints

    def __init__(self, checked: CheckedRun, world: World, *, started: float | None = None):
        """Prepare without writing. `started` is the start of the run's clock (`time.perf_counter`); default: now."""
        self.world = world
        self.folder = checked.config.run.folder
        self.console = Console(enabled=world.is_main)
        self.start_step = 0
        """last step before this job"""
        self.checked = checked
        self.num_steps = checked.num_steps
        self._record = RunRecord(0, {})
        self.has_begun = False
        self._started = time.perf_counter() if started is None else started
        self._step_started = self._started
        self._startup_seconds: float | None = None
        self.lower_limit: Callable[[], str] = str
        """lets the next attempt begin with fewer tokens per micro-batch; returns a description"""

    def counted(self, num_rows: int) -> CheckedRun:
        """Return the run's settings with its number of steps, which epochs over so many rows may decide."""
        self.checked = self.checked.counted(num_rows)
        self.num_steps = self.checked.num_steps
        return self.checked

    def resume(self, admitted: Resuming, state: Savable) -> None:
        """Read the chosen checkpoint, and begin to write into the folder. `state` is saved in checkpoints."""
        admitted.take_folder()
        point = admitted.read(state)
        if point is not None:
            self.start_step = point.record.step
        self._record = replace(point.record if point else RunRecord(0, {}), identity=admitted.identity)
        on_every_rank(lambda: self._begin(admitted, state))
        if point is not None:
            self.console.note(f"resumed from {point.folder} after step {self.start_step}")

    def _begin(self, admitted: Resuming, state: Savable) -> None:
        """Open the logs, and remove the steps that will be repeated: all of them without a checkpoint."""
        config, point = self.checked.config, admitted.point
        if self.world.is_main:
            write_start(self.checked, self.world, self.console, admitted)
        self.logs = RunLogs(
            self.folder, self.world, self.console, config=config.log,
            tracked=tracked_run(config.run, config.log, self.checked.resolved_config),
            last_step=point.record.step if point else -1, is_logged=not self._record.unlogged,
            sets=dict.fromkeys(self.checked.sets_of(self.world.size)),
        )  # fmt: skip
        self.checkpoints = Checkpoints(admitted.store, state, self.logs, point)
        self.has_begun = True

    def remaining_steps(self) -> Iterator[int]:
        """Yield the remaining steps, numbered from 1. From the first one on ranks stop only by agreement."""
        request.phase = "running"
        # A warm start has a run's steps after it, which its own lines would hide.
        every = -(-self.num_steps // LINES_OF_WARM_START) if self.folder.name == WARM_START else 1
        self.console.start(self.num_steps, phase=self.checked.phase, done_steps=self.start_step, every=every)
        for step in range(self.start_step + 1, self.num_steps + 1):
            if self._record.is_finished:
                return
            self.begin_step()
            faultpoint("step", step)
            activity.begin_step(step)
            yield step

    def begin_step(self) -> None:
        """Start the clock of a step, or of the evaluation before the first one; earlier time is the start-up."""
        self._step_started = time.perf_counter()
        if self._startup_seconds is None:
            self._startup_seconds = self._step_started - self._started

    def end_early(self) -> None:
        """Make the present step the last one."""
        self._record = replace(self._record, is_finished=True)

    @property
    def present_step(self) -> int:
        """The step that isn't finished yet."""
        return self._record.step + 1

    def is_last(self, step: int) -> bool:
        return step == self.num_steps or self._record.is_finished

    def finish_evaluation_before(self, accuracy: Estimate) -> None:
        """Write the metrics of the evaluation before the first step, as those of step 0."""
        interval = [accuracy.low, accuracy.high]
        self._record = replace(self._record, accuracy_before=accuracy.value, accuracy_before_interval=interval)
        self._log_step(0)

    def finish_step(self, step: int) -> None:
        """Write the step's metrics, then a checkpoint if due. Raises Stopped if a rank was asked to stop.

        In this order, a resumed run finds the metrics of every step in its checkpoint. Raises ConfigError, on every
        rank, after too many updates without a finite gradient.
        """
        self._log_step(step)
        if problem := too_many_skips(self._record.metrics, self.checked.config.train.max_skipped_in_a_row):
            self.checkpoints.finish()
            raise ConfigError(problem)
        self._record = replace(self._record, step=step)
        is_end = self.is_last(step) or self.logs.stop_reason is not None
        if self.is_last(step) or self.checkpoints.is_due(step, self._record.metrics):
            self._save(waits=is_end)
        if self.logs.stop_reason is not None and not self.is_last(step):
            self.stop(self.logs.stop_reason)

    def stop_before_logging(self, step: int, reason: str) -> NoReturn:
        """Stop in the evaluation after a step: its records are saved, and logged once it has been evaluated.

        Before the first step there is nothing to save.
        """
        if step > self._record.step:
            self._record = replace(self._record, step=step, unlogged=self.logs.take_unwritten())
        self.stop(reason)

    @property
    def has_unlogged_step(self) -> bool:
        """Return True if the run resumed from a step that must still be evaluated and logged."""
        return bool(self._record.unlogged)

    def finish_unlogged_step(self) -> None:
        """Log the step that the run resumed from, after its evaluation, and save it if due."""
        step, unlogged = self._record.step, self._record.unlogged
        self._record = replace(self._record, unlogged={})
        self.logs.give_back(unlogged)
        self.finish_step(step)

    def stop(self, reason: str) -> NoReturn:
        """End the run after its last finished step, saved if it wasn't. Raises Stopped.

        The exit code differs if that step could not be saved.
        """
        self.checkpoints.finish()
        newest = self.checkpoints.newest
        if self._record.step > 0 and (newest is None or step_of_folder(newest.name) != self._record.step):
            self._save(waits=True)
        request.phase = "ending"
        self.logs.close()
        self.checkpoints.close()
        end = self.end(asked=reason)
        self.console.close()
        if self.world.is_main:
            write_early_end(self.folder, end.verdict, end.line)
        # No rank leaves while others still write.
        barrier()
        raise Stopped(reason, end.line, is_agreed=True, code=end.code)

    def _save(self, *, waits: bool) -> None:
        self.checkpoints.save(self._record, texts_of_checkpoint(self.checked, self._record.step), waits=waits)

    def _log_step(self, step: int) -> None:
        seconds = time.perf_counter() - self._step_started
        metrics = self.logs.write_step(step, seconds, self._record.metrics, notice=self.checkpoints.take_end())
        self.checkpoints.settle(self.logs.notice)
        self._record = replace(self._record, metrics=metrics)

    @property
    def timeline(self) -> Timeline | None:
        """Timeline of this rank's stages; None before the run has begun."""
        return self.logs.timeline if self.has_begun else None

    def end(self, first: FirstFailure | None = None, *, asked: str | None = None) -> End:
        """Return the run's end: by `first`, the first failure of all ranks, as `asked`, or at its last step."""
        failure = None
        if first is not None:
            asked = reason_of_stop(first.cause)
            is_own = first.rank == 0 and not first.is_death
            failure = first.cause if is_own else f"rank {first.rank}: {first.cause}"
        newest = self.checkpoints.newest if self.has_begun else None
        return end_of(
            f"step {min(self.present_step, self.num_steps)} of {self.num_steps}",
            asked=asked, failure=None if asked else failure, newest=newest,
            unsaved=self.checkpoints.problem if self.has_begun else None,
        )  # fmt: skip

    def finish(self, **fields: object) -> None:
        """Close the logs, and write summary and report from the main rank; `fields` go into the summary.

        Raises Stopped, with a different exit code, if the last step could not be saved.
        """
        faultpoint("shutdown")
        self.checkpoints.finish()
        self.logs.close()
        self.checkpoints.close()
        # The report reads every rank's timeline, and other ranks may read the summary next.
        barrier()
        end = self.end()
        if self.world.is_main:
            seconds = {"seconds": time.perf_counter() - self._started, "startup_seconds": self._startup_seconds}
            outcome = outcome_of(end, self._record, self.folder, self.checkpoints) | seconds | fields
            write_outcome(self.folder, outcome, self.console, phase=self.checked.phase)
        barrier()
        if end.code:
            raise Stopped("", end.line, is_agreed=True, code=end.code)
