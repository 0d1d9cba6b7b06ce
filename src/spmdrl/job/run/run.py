"""A run's folder: what is logged and kept of it, and where it goes on after a stop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from spmdrl.config.config import Config
from spmdrl.dataflow.data.data_rows import SourceRows
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.training.checkpoints.checkpoint import CheckpointStore
from spmdrl.job.model.model_source import CHECKPOINTS, MODEL, ModelSource, newest_model
from spmdrl.job.run.best_checkpoint import LINK, BestStep, better_of, is_due_for_best, point_to, unknown_metric
from spmdrl.job.run.config_changes import RESOLVED_CONFIG, changed_settings, resolved_config_until
from spmdrl.job.run.memory_advice import explained_memory
from spmdrl.job.run.model_card import CARD, model_card
from spmdrl.job.run.resuming import RUN_FILE, ResumePoint, RunRecord, find_resume_point
from spmdrl.job.run.run_folder import check_disk_space, checkpoint_bytes, num_parameters, on_every_rank, on_main
from spmdrl.job.run.savable import Savable
from spmdrl.job.start.run_identity import identity_of
from spmdrl.observability.health import HealthWatch, counts_so_far, trouble_of
from spmdrl.observability.logs.jsonl import JsonlWriter, write_atomic
from spmdrl.observability.logs.log import (
    CHECKPOINTS_FILE,
    METRICS_FILE,
    MetricsLog,
    SampleRecord,
    SamplesLog,
    read_metrics,
)
from spmdrl.observability.logs.outage import going_on_without, take_num_refused
from spmdrl.observability.logs.trackers import TrackedRun
from spmdrl.observability.metrics import Recorder, encode, merge
from spmdrl.observability.report.report import write_report
from spmdrl.observability.summary import read_summary, software_versions, start_facts, write_summary
from spmdrl.observability.terminal.console import Console
from spmdrl.observability.terminal.units import bytes_text, duration
from spmdrl.observability.timeline.timeline import Timeline, timeline_file
from spmdrl.resources.collectives import barrier, gather_bytes
from spmdrl.resources.startup.ending import Interrupted, raise_noted_interrupt
from spmdrl.resources.world import World

WARM_START = "warm_start"


class Run:
    """One run on this rank: admitted to its folder, resumed, logged, finished. All of these are collective."""

    timeline: Timeline
    """from `resume` on, as the logs are"""

    def __init__(
        self, config: Config, world: World, *, num_steps: int, resolved_config: str, phase: str,
        base_model: str, started: float | None = None,
    ):  # fmt: skip
        """Nothing is written yet. `phase` names what the steps do: sft, or an algorithm such as grpo. `base_model` is
        named in model cards. `started` is when the clock of the run's `seconds` began (`time.perf_counter`); now,
        unless given."""
        self.config = config
        self.world = world
        self.folder = config.run.folder
        self.num_steps = num_steps
        self.start_step = 0
        self.recorder = Recorder()
        self.console = Console(enabled=world.is_main)
        self.last_checkpoint: Path | None = None
        self.metrics: dict[str, float] = {}
        self.first_metrics: dict[str, float] = {}
        self.last_step = 0
        self.accuracy_before: float | None = None
        self.accuracy_before_interval: list[float] | None = None
        self.is_finished = False
        """Whether the run was ended before, so that no step remains."""
        self.identity: dict[str, Any] = {}
        self.num_parameters: int | None = None
        self.samples_log: SamplesLog | None = None
        required = (RUN_FILE, f"{MODEL}/config.json")
        self.store = CheckpointStore(
            self.folder / CHECKPOINTS, config.checkpoint, is_main=world.is_main, required=required
        )
        self.phase = phase
        self._health = HealthWatch()
        self._base_model = base_model
        self._resolved_config = resolved_config
        self._best: BestStep | None = None
        self._is_best_unknown = False
        """whether it was said that no step has the metric of `checkpoint.best`"""
        self._started = time.perf_counter() if started is None else started
        self._step_started = self._started
        self._startup_seconds: float | None = None
        self._checkpoints_log: JsonlWriter | None = None
        self._metrics_log: MetricsLog | None = None
        self._failed_save: tuple[int, str] | None = None
        """the last checkpoint's step, and why it could not be written"""
        self._has_begun = False
        self._point: ResumePoint | None = None
        self._passed_over: dict[Path, str] = {}

    def admit(self, source: ModelSource, rows: Sequence[SourceRows], *, beside: Sequence[DecoderConfig] = ()) -> None:
        """Choose the checkpoint to go on from, before the model is loaded and anything is written. Collective.

        `beside` are the other models that checkpoints hold.

        Raises ConfigError on every rank where the folder holds another run, no checkpoint that can be used, or too
        little space.
        """
        self.identity = on_main(self.world, lambda: identity_of(self.config, self.phase, source.folder, rows))
        self.num_parameters = num_parameters(source.decoder)
        self._choose_checkpoint()
        self.store.remove_leftovers()
        record = self._point.record if self._point else None
        steps_left = 0 if record and record.is_finished else self.num_steps - (record.step if record else 0)
        if steps_left > 0:
            dtype = self.config.model.compute_dtype(self.world.device.kind)
            num_bytes = checkpoint_bytes(self.config, [source.decoder, *beside], dtype)
            on_main(
                self.world,
                lambda: check_disk_space(self.config, num_bytes, num_steps=steps_left, present=len(self.store.steps())),
            )

    def resume(self, state: Savable) -> None:
        """Take up the checkpoint that was chosen, and begin to write into the folder. Collective.

        A checkpoint whose content can't be read, though its digests are right, is damaged too: the one before is taken.
        """
        while self._point is not None and (problem := self._problem_of_reading(state, self._point.folder)):
            self._passed_over[self._point.folder] = problem
            self._choose_checkpoint()
        if self._point is not None:
            self._go_on_after(self._point)
        on_every_rank(self._begin)
        if self._point is not None:
            self.console.note(f"resumed from {self._point.folder} after step {self.start_step}")

    def remaining_steps(self) -> Iterator[int]:
        """Steps still to do, numbered from 1."""
        self.console.start(self.num_steps, phase=self.phase, done_steps=self.start_step)
        for step in range(self.start_step + 1, self.num_steps + 1):
            if self.is_finished:
                return
            raise_noted_interrupt()
            self.begin_step()
            yield step

    def begin_step(self) -> None:
        """Start the clock of a step, or of the evaluation before the first one; what was before is the start-up."""
        self._step_started = time.perf_counter()
        if self._startup_seconds is None:
            self._startup_seconds = self._step_started - self._started

    def finish_step(self, step: int, state: Savable) -> None:
        """Write the step's metrics, then a checkpoint where one is due. Collective.

        In this order, a resumed run finds the metrics of every step that its checkpoint holds.
        """
        self.log_step(step)
        self.last_step = step
        interval = self.config.checkpoint.interval
        is_due = step == self.num_steps or self.is_finished or (interval and step % interval == 0)
        if is_due or is_due_for_best(self.config.checkpoint, self._best, step, self.metrics):
            self.save(step, state)

    def save(self, step: int, state: Savable) -> None:
        """Write a checkpoint; a failure costs none of the earlier ones, and the run goes on. Collective.

        Its metrics are those of the next step that is logged; checkpoints.jsonl has them under its own step.
        """
        best = better_of(self.config.checkpoint, self._best, step, self.metrics)
        record = RunRecord(
            step, self.identity, self.is_finished, self.first_metrics, self.metrics, self.accuracy_before,
            self.accuracy_before_interval, best, is_resumable=not self.config.checkpoint.model_only,
        )  # fmt: skip

        def write(folder: Path) -> list[Path]:
            paths = state.write_to(folder)
            if self.world.is_main:
                card = model_card(self.config, base_model=self._base_model, phase=self.phase, step=step)
                texts = {RUN_FILE: record.to_json(), RESOLVED_CONFIG: self._resolved_config, f"{MODEL}/{CARD}": card}
                for name, content in texts.items():
                    (folder / name).write_text(content, encoding="utf-8")
                    paths.append(folder / name)
            return paths

        started = time.perf_counter()
        with self.console.doing(f"saving the checkpoint of step {step}"), self.timeline.stage("checkpoint", step):
            # The best one so far goes with the next checkpoint, once the link leads to the better one.
            kept = [one.step for one in (self._best, best) if one is not None]
            result = self.store.save(step, write, kept=kept)
        seconds = time.perf_counter() - started
        if self._checkpoints_log is not None:
            name = result.folder.name if result.folder else None
            self._checkpoints_log.write(
                {"step": step, "seconds": seconds, "bytes": result.num_bytes, "folder": name, "error": result.error}
            )
        self.recorder.maximum("checkpoint/seconds", seconds)
        if result.folder is None:
            self._failed_save = (step, str(result.error))
            self.recorder.maximum("checkpoint/failed", 1.0)
            self.console.note(f"WARNING: checkpoint of step {step} FAILED, the run goes on without it: {result.error}")
        else:
            self.recorder.maximum("checkpoint/bytes", float(result.num_bytes))
            size = bytes_text(result.num_bytes)
            self.console.note(f"checkpoint of step {step}: {size} in {duration(seconds)}, {result.folder}")
            self.last_checkpoint = result.folder
            self._failed_save = None
            self._take_best(best)

    def _take_best(self, best: BestStep | None) -> None:
        """Let the link lead to the best checkpoint, now that it is there."""
        name = self.config.checkpoint.best
        if best is not None and best != self._best:
            self._best = best
            self.console.note(f"{best.metric} {best.value:.6g} of step {best.step} is the best so far, kept as {LINK}")
            if self.world.is_main:
                with going_on_without(f"the link {LINK}"):
                    point_to(best, self.store.root)
        if name is not None and best is None and not self._is_best_unknown:
            self._is_best_unknown = True
            self.console.note(unknown_metric(name, self.metrics))

    def log_step(self, step: int) -> None:
        """Reduce the step's metrics over ranks and write them. Collective."""
        for stage, seconds in self.timeline.stage_seconds(step).items():
            self.recorder.maximum(f"time/{stage}", seconds)
        self.recorder.maximum("time/step", time.perf_counter() - self._step_started)
        if refused := take_num_refused():
            self.recorder.total("log/refused_writes", refused)
        metrics = self._with_rates(merge(gather_bytes(encode(self.recorder.drain()))))
        self.metrics = metrics | counts_so_far(metrics, self.metrics)
        self._note_first(step)
        if self._metrics_log is not None:
            self._metrics_log.write(step, self.metrics)
            for warning in self._health.warnings(step, self.metrics):
                self.console.note(warning)

    def _with_rates(self, metrics: dict[str, float]) -> dict[str, float]:
        tokens, seconds = metrics.get("perf/tokens"), metrics["time/step"]
        if tokens is not None:
            metrics["perf/tokens_per_second"] = tokens / seconds
            # Eq. 5 of the MindSpeed RL paper, with real lengths in place of the longest ones.
            metrics["perf/eq5_tokens_per_second_per_device"] = tokens / seconds / self.world.size
        return metrics

    def _note_first(self, step: int) -> None:
        if not self.first_metrics and "reward" in self.metrics:
            self.first_metrics = {"step": step, "reward": self.metrics["reward"]}

    @contextmanager
    def recording_failure(self) -> Iterator[None]:
        """Record an exception in summary and report, then re-raise it, explained."""
        try:
            with explained_memory(self.config, lambda: self.timeline.failed_stage):
                yield
        except KeyboardInterrupt as failure:
            # Published at once, before the report takes its time.
            self.world.first_failure(failure)
            self._note_end("interrupted", None)
            raise Interrupted(self._interruption()) from failure
        except BaseException as failure:
            first = self.world.first_failure(failure)
            self._note_end("failed", first.cause if first.rank == 0 else f"rank {first.rank}: {first.cause}")
            raise

    def _note_end(self, verdict: str, error: str | None) -> None:
        self.console.close()
        if self.world.is_main and self._has_begun:
            with going_on_without("the summary and report"):
                write_summary(self.folder, verdict=verdict, error=error)
                write_report(self.folder)

    def _interruption(self) -> str:
        where = f"interrupted in step {self.last_step + 1} of {self.num_steps}"
        if self.last_checkpoint is None:
            return f"{where}, before a checkpoint; the same command starts anew"
        return f"{where}; the same command goes on from {self.last_checkpoint}"

    def finish(self, verdict: str, **fields: object) -> None:
        """Close the logs, and write summary and report from the main rank. Collective."""
        self.timeline.close()
        # The report reads every rank's timeline, and other ranks may read the summary next.
        barrier()
        if self.world.is_main:
            self._write_outcome(verdict, fields)
        barrier()

    def _write_outcome(self, verdict: str, fields: dict[str, object]) -> None:
        assert self._metrics_log is not None and self.samples_log is not None
        self._metrics_log.close()
        self.samples_log.close()
        if self._checkpoints_log is not None:
            self._checkpoints_log.close()
        report = self.folder / "report.html"
        summary = {
            "verdict": verdict,
            "trouble": [*trouble_of(self.metrics), *self._trouble_of_saving()] or None,
            "steps": self.last_step,
            "reward_first": self.first_metrics.get("reward"),
            "reward_last": self.metrics.get("reward"),
            "accuracy_before": self.accuracy_before,
            "accuracy_before_interval": self.accuracy_before_interval,
            "seconds": time.perf_counter() - self._started,
            "startup_seconds": self._startup_seconds,
            "checkpoint": str(self.last_checkpoint / MODEL) if self.last_checkpoint else None,
            "report": str(report),
        }
        # What an earlier part of a resumed run has found out stays.
        known = {name: value for name, value in (summary | fields).items() if value is not None}
        with going_on_without("the summary and report"):
            # An error is that of an earlier part, which this one got over.
            write_summary(self.folder, error=None, **known)
            write_report(self.folder)
        # What could not be written is shown all the same.
        self.console.summary(read_summary(self.folder) | known, phase=self.phase)

    def _trouble_of_saving(self) -> list[str]:
        if self._failed_save is None:
            return []
        step, reason = self._failed_save
        return [f"the checkpoint of step {step}, the last one, could not be written ({reason})"]

    def _choose_checkpoint(self) -> None:
        self._point, notes = find_resume_point(self.store, self.config, self.world, self.identity, self._passed_over)
        for note in notes:
            self.console.note(note)

    def _problem_of_reading(self, state: Savable, folder: Path) -> str:
        """Take the state back; what hindered the first rank that could not, on every rank. Collective."""
        problem = ""
        try:
            with self.console.doing("reading the checkpoint"):
                state.read_from(folder)
        except Exception as failure:
            # The files may hold anything, and nothing but reading them is done here.
            problem = f"{type(failure).__name__}: {failure}"
        return next((part.decode() for part in gather_bytes(problem.encode()) if part), "")

    def _go_on_after(self, point: ResumePoint) -> None:
        record = point.record
        self.start_step = self.last_step = record.step
        self.is_finished = record.is_finished
        self.first_metrics, self.metrics = dict(record.first_metrics), dict(record.metrics)
        self.accuracy_before = record.accuracy_before
        self.accuracy_before_interval = record.accuracy_before_interval
        self.last_checkpoint = point.folder
        if record.best is not None and record.best.metric == self.config.checkpoint.best:
            self._best = record.best

    def _begin(self) -> None:
        """Open the logs, and cut from them what will be done again; without a checkpoint that is all of it."""
        last_step = self.start_step if self._point else -1
        timeline = timeline_file(self.folder, self.world.rank)
        self.timeline = Timeline(timeline, self.world.rank, shown=self.console.stage)
        self.timeline.truncate_after(last_step)
        if self.world.is_main:
            note_abandoned(self.folder, self.console)
            self._keep_config()
            self._settle_link()
            if self.config.checkpoint.model_only:
                self.console.note("checkpoint.model_only: checkpoints hold the model alone; none can be resumed from")
            devices = f"{self.world.size} x {self.world.device.kind}"
            facts = {"versions": software_versions(), "devices": devices} | start_facts()
            write_summary(self.folder, verdict="running", parameters=self.num_parameters, **facts)
            self._metrics_log = MetricsLog(
                self.folder, self.config.log.backends, console=self.console, run=self._tracked()
            )
            self._metrics_log.truncate_after(last_step)
            self.samples_log = SamplesLog(self.folder)
            self.samples_log.truncate_after(last_step)
            self._checkpoints_log = JsonlWriter(self.folder / CHECKPOINTS_FILE)
            self._checkpoints_log.truncate_after(last_step)
        self._has_begun = True

    def _settle_link(self) -> None:
        """Let the link lead to the best step before this one; steps that will be done again don't count."""
        (self.store.root / LINK).unlink(missing_ok=True)
        if self._best is not None and self.store.folder_of(self._best.step).is_dir():
            point_to(self._best, self.store.root)

    def _tracked(self) -> TrackedRun:
        """What services show of this run; a warm start is named by the run that it belongs to."""
        log, run = self.config.log, self.config.run
        folder = self.folder.resolve()
        name = run.name if run.dir is None else folder.name
        if folder.name == WARM_START:
            name = f"{folder.parent.name} {WARM_START}"
        settings = yaml.safe_load(self._resolved_config)
        return TrackedRun(name, log.project, log.group, log.tags, settings if isinstance(settings, dict) else {})

    def write_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        """Keep some samples of a step, on the main rank; services get those of every `log.samples_interval` steps."""
        if self.samples_log is None or self._metrics_log is None:
            return
        self.samples_log.write(samples)
        interval = self.config.log.samples_interval
        if samples and interval and (step - 1) % interval == 0:
            self._metrics_log.write_samples(step, samples)

    def _keep_config(self) -> None:
        """Write the resolved configuration; where it changed at this step, say how, and keep the earlier one too."""
        path = self.folder / RESOLVED_CONFIG
        if self._point is not None:
            in_checkpoint = self._point.folder / RESOLVED_CONFIG
            # Checkpoints of earlier versions don't hold it.
            before = text_of(in_checkpoint if in_checkpoint.is_file() else path)
            changes = list(changed_settings(before, self._resolved_config))
            for key, old, new in changes:
                self.console.note(f"{key} was {old} until step {self.start_step} and is {new} from here")
            if changes:
                write_atomic(self.folder / resolved_config_until(self.start_step), before)
        write_atomic(path, self._resolved_config)


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def note_abandoned(folder: Path, console: Console) -> None:
    """Say so where the run that was in the folder, which nobody holds any more, never wrote its end."""
    if read_summary(folder).get("verdict") != "running":
        return
    metrics = folder / METRICS_FILE
    last = max((step for step, _ in read_metrics(folder)), default=None)
    when = time.strftime(" at %Y-%m-%d %H:%M:%S", time.localtime(metrics.stat().st_mtime)) if metrics.is_file() else ""
    place = "before its first step" if last is None else f"after step {last}{when}"
    console.note(f"the job before ended without a word {place}")


def finished_model(folder: Path, world: World) -> Path | None:
    """The model that a run left in its folder, or None if it didn't come to its end. Collective."""
    is_done = on_main(world, lambda: read_summary(folder).get("verdict") == "done")
    return newest_model(folder, world) if is_done else None
