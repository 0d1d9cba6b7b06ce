"""One run on this rank, from its admission to its outcome: its steps, its record, and how it resumes after a stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NoReturn

from spmdrl.config.reader import ConfigError
from spmdrl.engines.models.hf.model_folder import compute_dtype
from spmdrl.engines.training.checkpoints.checkpoint import CheckpointStore, model_dtype
from spmdrl.engines.training.checkpoints.manifest import step_of_folder
from spmdrl.job.model.model_source import CHECKPOINTS, MODEL, ModelSource
from spmdrl.job.run.checkpoints import Checkpoints
from spmdrl.job.run.memory_advice import explained_memory
from spmdrl.job.run.outcome import (
    CARD,
    WARM_START,
    End,
    EndFacts,
    end_of,
    model_card,
    note_abandoned,
    outcome_of,
    tracked_run,
    write_early_end,
    write_outcome,
    write_start,
)
from spmdrl.job.run.resuming import RUN_FILE, ResumePoint, Resuming, RunRecord, identity_of, keep_config
from spmdrl.job.run.run_folder import check_disk_space, num_parameters, on_every_rank, on_main
from spmdrl.job.run.run_logs import RunLogs
from spmdrl.job.run.savable import Savable
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.nouns.roles import POLICY, Role
from spmdrl.observability.fault_points import faultpoint
from spmdrl.observability.health import too_many_skips
from spmdrl.observability.report.config_diff import RESOLVED_CONFIG
from spmdrl.observability.statistics import Estimate
from spmdrl.observability.summary import read_summary
from spmdrl.observability.terminal.console import Console
from spmdrl.observability.timeline import HeldMemory
from spmdrl.resources.collectives import barrier
from spmdrl.resources.world import World
from spmdrl.runtime.supervision.activity import activity
from spmdrl.runtime.supervision.ending import FirstFailure, reason_of_stop
from spmdrl.runtime.supervision.fence import arm_fence, loss_of_folder, take_folder
from spmdrl.runtime.supervision.stop_request import Stopped, request

LINES_OF_WARM_START = 20


class Run:
    """Steps through a run. All of its methods are collective.

    made -> admitted: a checkpoint is chosen -> resumed: it was read, `logs` and `checkpoints` are there -> finished
    """

    logs: RunLogs
    checkpoints: Checkpoints

    def __init__(self, checked: CheckedRun, world: World, *, started: float | None = None):
        """Nothing is written yet. `started` is when the run's clock began (`time.perf_counter`); now, unless given."""
        self.world = world
        self.folder = checked.config.run.folder
        self.console = Console(enabled=world.is_main)
        self.num_steps = checked.num_steps
        self.start_step = 0
        """the last step that was done before this job"""
        self._checked = checked
        self._store = CheckpointStore(
            self.folder / CHECKPOINTS, checked.config.checkpoint, is_main=world.is_main,
            required=(RUN_FILE, f"{MODEL}/config.json"),
        )  # fmt: skip
        self._record = RunRecord(0, {})
        self._num_parameters = 0
        self._resuming: Resuming | None = None
        self._has_begun = False
        self._started = time.perf_counter() if started is None else started
        self._step_started = self._started
        self._startup_seconds: float | None = None
        self.lower_limit: Callable[[], str] = str
        """has the next attempt begin with fewer tokens per micro-batch; returns what it will do, in words"""

    @property
    def identity(self) -> Mapping[str, object]:
        """What must not change between the parts of a run."""
        return self._record.identity

    def admit(self, sources: Mapping[Role, ModelSource]) -> None:
        """Choose the checkpoint to go on from, before models are loaded and anything is written.

        Raises ConfigError on every rank where the folder holds another run, no checkpoint that can be used, or too
        little space.
        """
        config, policy = self._checked.config, sources[POLICY]
        folders = {role: source.folder for role, source in sources.items()}
        identity = on_main(self.world, lambda: identity_of(self._checked, folders))
        self._record = RunRecord(0, identity)
        self._num_parameters = num_parameters(policy.decoder)
        self._resuming = Resuming(self._store, config, self.world, identity=identity, console=self.console)
        self._store.remove_leftovers()
        record = self._resuming.point.record if self._resuming.point else self._record
        steps_left = 0 if record.is_finished else self.num_steps - record.step
        if steps_left > 0:
            decoders = [source.decoder for role, source in sources.items() if role.checkpoint is not None]
            dtype = model_dtype(config.checkpoint, compute_dtype(config.model, self.world.device.kind))
            on_main(
                self.world, partial(check_disk_space, config.run, self._store, decoders, dtype, num_steps=steps_left)
            )

    def resume(self, state: Savable) -> None:
        """Read the checkpoint that was chosen, and begin to write into the folder. `state` is what checkpoints hold."""
        assert self._resuming is not None, "a run is admitted before it resumes"
        # An earlier job that lost its lock, and goes on elsewhere, writes nothing from here on.
        arm_fence(self.folder, on_main(self.world, lambda: take_folder(self.folder).decode()).encode())
        # Its last checkpoint may have come since this job chose one.
        self._resuming.choose_newer()
        point = self._resuming.read(state)
        if point is not None:
            self.start_step = point.record.step
            self._record = replace(point.record, identity=self._record.identity)
        on_every_rank(lambda: self._begin(state, point))
        if point is not None:
            self.console.note(f"resumed from {point.folder} after step {self.start_step}")

    def _begin(self, state: Savable, point: ResumePoint | None) -> None:
        """Open the logs, and cut from them the steps that will be done again: all of them without a checkpoint."""
        config, resolved = self._checked.config, self._checked.resolved_config
        if self.world.is_main:
            note_abandoned(self.folder, self.console)
            is_finished = point is not None and (point.record.is_finished or point.record.step >= self.num_steps)
            if is_finished:
                self.console.note(
                    f"{self.folder} holds a finished run, and nothing is trained; go on with a higher "
                    f"{self._checked.verb.replace('-', '_')}.max_steps, or begin anew with resume=never or another "
                    f"{config.run.folder_key}"
                )
            keep_config(resolved, self.folder, point, self.console, is_finished=is_finished)
            are_messages = self._checked.prompts_are_messages
            write_start(self.folder, self.world, self._num_parameters, prompts_are_messages=are_messages)
        tracked = tracked_run(config.run, config.log, resolved)
        self.logs = RunLogs(
            self.folder, self.world, self.console, config=config.log, tracked=tracked,
            last_step=point.record.step if point else -1, is_logged=not self._record.unlogged,
        )  # fmt: skip
        self.checkpoints = Checkpoints(self._store, state, self.logs, point)
        self._has_begun = True

    def remaining_steps(self) -> Iterator[int]:
        """Steps still to do, numbered from 1. From the first one on ranks stop only where all agree."""
        request.phase = "running"
        # A warm start has a run's steps after it, which its own lines would hide.
        every = -(-self.num_steps // LINES_OF_WARM_START) if self.folder.name == WARM_START else 1
        self.console.start(self.num_steps, phase=self._checked.phase, done_steps=self.start_step, every=every)
        for step in range(self.start_step + 1, self.num_steps + 1):
            if self._record.is_finished:
                return
            self.begin_step()
            faultpoint("step", step)
            activity.begin_step(step)
            yield step

    def begin_step(self) -> None:
        """Start the clock of a step, or of the evaluation before the first one; what was before is the start-up."""
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
        """Write the step's metrics, then a checkpoint where one is due. Raises Stopped where a rank was asked to stop.

        In this order, a resumed run finds the metrics of every step that its checkpoint holds. Raises ConfigError, on
        every rank, after too many updates without a finite gradient.
        """
        self._log_step(step)
        if problem := too_many_skips(self._record.metrics, self._checked.config.train.max_skipped_in_a_row):
            self.checkpoints.finish()
            raise ConfigError(problem)
        self._record = replace(self._record, step=step)
        is_end = self.is_last(step) or self.logs.stop_reason is not None
        if self.is_last(step) or self.checkpoints.is_due(step, self._record.metrics):
            self._save(waits=is_end)
        if self.logs.stop_reason is not None and not self.is_last(step):
            self.stop(self.logs.stop_reason)

    def stop_before_logging(self, step: int, reason: str) -> NoReturn:
        """As `stop`, in the evaluation after a step: what it recorded is saved, and logged once it has been evaluated.

        Before the first step nothing is to be saved.
        """
        if step > self._record.step:
            self._record = replace(self._record, step=step, unlogged=self.logs.take_unwritten())
        self.stop(reason)

    @property
    def has_unlogged_step(self) -> bool:
        """Whether the run resumed from a step that is still to be evaluated and logged."""
        return bool(self._record.unlogged)

    def finish_unlogged_step(self) -> None:
        """Log the step that the run resumed from, now that it has been evaluated, and save it where that is due."""
        step, unlogged = self._record.step, self._record.unlogged
        self._record = replace(self._record, unlogged={})
        self.logs.give_back(unlogged)
        self.finish_step(step)

    def stop(self, reason: str) -> NoReturn:
        """End the run as the last finished step left it, which is saved unless it has been. Raises Stopped.

        With a code of its own where that could not be saved.
        """
        self.checkpoints.finish()
        newest = self.checkpoints.newest
        if self._record.step > 0 and (newest is None or step_of_folder(newest.name) != self._record.step):
            self._save(waits=True)
        request.phase = "ending"
        self.logs.close()
        self.checkpoints.close()
        end = self._end(asked=reason)
        self._end_early(end, writes=self.world.is_main)
        # No rank leaves while others still write.
        barrier()
        raise Stopped(reason, end.line, is_agreed=True, code=end.code)

    def _save(self, *, waits: bool) -> None:
        card = model_card(self._checked, self._record.step)
        texts = {RESOLVED_CONFIG: self._checked.resolved_config, f"{MODEL}/{CARD}": card}
        self.checkpoints.save(self._record, texts, waits=waits)

    def _log_step(self, step: int) -> None:
        seconds = time.perf_counter() - self._step_started
        metrics = self.logs.write_step(step, seconds, self._record.metrics, notice=self.checkpoints.take_end())
        self.checkpoints.settle(self.logs.notice)
        self._record = replace(self._record, metrics=metrics)

    @contextmanager
    def recording_failure(self) -> Iterator[None]:
        """Record an exception in summary and report, then re-raise it, explained."""
        config = self._checked.config
        try:
            with explained_memory(config.rollout, config.train, self, config.reward.judge):
                yield
        except BaseException as failure:
            if isinstance(failure, Stopped) and failure.is_agreed:
                raise
            # Published at once, before the report takes its time.
            first = self.world.first_failure(failure)
            if self._has_begun:
                self.checkpoints.finish_alone()
            end = self._end(first)
            # Behind a newer job's back, nothing is written into its folder.
            self._end_early(end, writes=self._writes_end_after(first) and not loss_of_folder(first.cause))
            if isinstance(failure, Stopped) and first.is_stop:
                raise Stopped(failure.reason, end.line, is_agreed=False) from failure
            raise

    def _writes_end_after(self, first: FirstFailure) -> bool:
        """Return True if this rank writes the end of the run: rank 0, or rank 1 if that one's process is gone."""
        if first.rank == 0 and first.is_death:
            return self.world.rank == 1 and read_summary(self.folder).get("verdict") == "running"
        return self.world.is_main

    def failed_stage(self) -> str | None:
        return self.logs.timeline.failed_stage if self._has_begun else None

    def held_memory(self) -> HeldMemory | None:
        return self.logs.timeline.held if self._has_begun else None

    def _end_early(self, end: End, *, writes: bool) -> None:
        self.console.close()
        if writes and self._has_begun:
            write_early_end(self.folder, end.verdict, end.line)

    def _end(self, first: FirstFailure | None = None, *, asked: str | None = None) -> End:
        """End of the run: by `first`, the first failure of all ranks, as it was `asked`, or at its last step."""
        failure = None
        if first is not None:
            asked = reason_of_stop(first.cause)
            is_own = first.rank == 0 and not first.is_death
            failure = first.cause if is_own else f"rank {first.rank}: {first.cause}"
        newest = self.checkpoints.newest if self._has_begun else None
        return end_of(
            EndFacts(
                f"step {min(self.present_step, self.num_steps)} of {self.num_steps}",
                asked, None if asked else failure, self.checkpoints.problem if self._has_begun else None, newest,
            )
        )  # fmt: skip

    def finish(self, **fields: object) -> None:
        """Close the logs, and write summary and report from the main rank; `fields` go into the summary.

        Raises Stopped, with a code of its own, where the last step could not be saved.
        """
        faultpoint("shutdown")
        self.checkpoints.finish()
        self.logs.close()
        self.checkpoints.close()
        # The report reads every rank's timeline, and other ranks may read the summary next.
        barrier()
        end = self._end()
        if self.world.is_main:
            seconds = {"seconds": time.perf_counter() - self._started, "startup_seconds": self._startup_seconds}
            outcome = outcome_of(end, self._record, self.folder, self.checkpoints) | seconds | fields
            write_outcome(self.folder, outcome, self.console, phase=self._checked.phase)
        barrier()
        if end.code:
            raise Stopped("", end.line, is_agreed=True, code=end.code)
