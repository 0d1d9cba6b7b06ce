"""One run on this rank, from its admission to its outcome: its steps, its record, and how it resumes after a stop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from spmdrl.engines.training.checkpoints.checkpoint import CheckpointStore
from spmdrl.job.model.model_source import CHECKPOINTS, MODEL, ModelSource
from spmdrl.job.run.checkpoints import Checkpoints
from spmdrl.job.run.config_changes import RESOLVED_CONFIG, keep_config
from spmdrl.job.run.memory_advice import explained_memory
from spmdrl.job.run.model_card import CARD, model_card
from spmdrl.job.run.outcome import note_abandoned, outcome_of, tracked_run, write_early_end, write_outcome, write_start
from spmdrl.job.run.resuming import RUN_FILE, ResumePoint, Resuming, RunRecord
from spmdrl.job.run.run_folder import check_disk_space, num_parameters, on_every_rank, on_main
from spmdrl.job.run.run_logs import RunLogs
from spmdrl.job.run.savable import Savable
from spmdrl.job.start.run_identity import identity_of
from spmdrl.job.start.start_checks import CheckedRun
from spmdrl.observability.statistics import Estimate
from spmdrl.observability.terminal.console import Console
from spmdrl.resources.collectives import barrier
from spmdrl.resources.startup.ending import Interrupted, raise_noted_interrupt
from spmdrl.resources.world import World
from spmdrl.types.roles import POLICY, Role


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
            dtype = config.checkpoint.model_dtype(config.model.compute_dtype(self.world.device.kind))
            on_main(
                self.world, partial(check_disk_space, config.run, self._store, decoders, dtype, num_steps=steps_left)
            )

    def resume(self, state: Savable) -> None:
        """Read the checkpoint that was chosen, and begin to write into the folder. `state` is what checkpoints hold."""
        assert self._resuming is not None, "a run is admitted before it resumes"
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
            keep_config(resolved, self.folder, point, self.console)
            write_start(self.folder, self.world, self._num_parameters)
        tracked = tracked_run(config.run, config.log, resolved)
        self.logs = RunLogs(
            self.folder, self.world, self.console, config=config.log, tracked=tracked,
            last_step=point.record.step if point else -1,
        )  # fmt: skip
        self.checkpoints = Checkpoints(self._store, state, self.logs, point)
        self._has_begun = True

    def remaining_steps(self) -> Iterator[int]:
        """Steps still to do, numbered from 1."""
        self.console.start(self.num_steps, phase=self._checked.phase, done_steps=self.start_step)
        for step in range(self.start_step + 1, self.num_steps + 1):
            if self._record.is_finished:
                return
            raise_noted_interrupt()
            self.begin_step()
            yield step

    def begin_step(self) -> None:
        """Start the clock of a step, or of the evaluation before the first one; what was before is the start-up."""
        self._step_started = time.perf_counter()
        if self._startup_seconds is None:
            self._startup_seconds = self._step_started - self._started

    def end_early(self) -> None:
        """Make the present step the last one."""
        self._record = replace(self._record, is_finished=True)

    def is_last(self, step: int) -> bool:
        return step == self.num_steps or self._record.is_finished

    def finish_evaluation_before(self, accuracy: Estimate) -> None:
        """Write the metrics of the evaluation before the first step, as those of step 0."""
        interval = [accuracy.low, accuracy.high]
        self._record = replace(self._record, accuracy_before=accuracy.value, accuracy_before_interval=interval)
        self._log_step(0)

    def finish_step(self, step: int) -> None:
        """Write the step's metrics, then a checkpoint where one is due.

        In this order, a resumed run finds the metrics of every step that its checkpoint holds.
        """
        self._log_step(step)
        self._record = replace(self._record, step=step)
        if self.is_last(step) or self.checkpoints.is_due(step, self._record.metrics):
            card = model_card(self._checked, step)
            texts = {RESOLVED_CONFIG: self._checked.resolved_config, f"{MODEL}/{CARD}": card}
            self.checkpoints.save(self._record, texts)

    def _log_step(self, step: int) -> None:
        metrics = self.logs.write_step(step, time.perf_counter() - self._step_started, self._record.metrics)
        first = self._record.first_metrics
        if not first and "reward" in metrics:
            first = {"step": step, "reward": metrics["reward"]}
        self._record = replace(self._record, first_metrics=first, metrics=metrics)

    @contextmanager
    def recording_failure(self) -> Iterator[None]:
        """Record an exception in summary and report, then re-raise it, explained."""
        config = self._checked.config

        def failed_stage() -> str | None:
            return self.logs.timeline.failed_stage if self._has_begun else None

        try:
            with explained_memory(config.rollout, config.train, failed_stage, config.reward.judge):
                yield
        except KeyboardInterrupt as failure:
            # Published at once, before the report takes its time.
            self.world.first_failure(failure)
            self._end_early("interrupted", None)
            raise Interrupted(self._interruption()) from failure
        except BaseException as failure:
            first = self.world.first_failure(failure)
            self._end_early("failed", first.cause if first.rank == 0 else f"rank {first.rank}: {first.cause}")
            raise

    def _end_early(self, verdict: str, error: str | None) -> None:
        self.console.close()
        if self.world.is_main and self._has_begun:
            write_early_end(self.folder, verdict, error)

    def _interruption(self) -> str:
        where = f"interrupted in step {self._record.step + 1} of {self.num_steps}"
        if not self._has_begun or self.checkpoints.newest is None:
            return f"{where}, before a checkpoint; the same command starts anew"
        return f"{where}; the same command goes on from {self.checkpoints.newest}"

    def finish(self, **fields: object) -> None:
        """Close the logs, and write summary and report from the main rank; `fields` go into the summary."""
        self.logs.close()
        self.checkpoints.close()
        # The report reads every rank's timeline, and other ranks may read the summary next.
        barrier()
        if self.world.is_main:
            seconds = {"seconds": time.perf_counter() - self._started, "startup_seconds": self._startup_seconds}
            outcome = outcome_of(self._record, self.folder, self.checkpoints) | seconds | fields
            write_outcome(self.folder, outcome, self.console, phase=self._checked.phase)
        barrier()
