"""A run's folder: what is logged and kept of it, and where it goes on after a stop."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spmdrl.config import Config
from spmdrl.engines.training.checkpoint import CheckpointStore
from spmdrl.job.actor import CHECKPOINTS, MODEL, newest_model
from spmdrl.job.savable import Savable
from spmdrl.observability.console import Console
from spmdrl.observability.health import HealthWatch, counts_so_far, trouble_of
from spmdrl.observability.log import MetricsLog, SamplesLog
from spmdrl.observability.metrics import Recorder, encode, merge
from spmdrl.observability.report import write_report
from spmdrl.observability.summary import read_summary, software_versions, write_summary
from spmdrl.observability.timeline import Timeline, timeline_file
from spmdrl.observability.units import bytes_text, duration
from spmdrl.resources.collectives import barrier, gather_bytes
from spmdrl.resources.world import World

RESOLVED_CONFIG = "config.resolved.yaml"
RUN_FILE = "run.json"


class Run:
    """One run on this rank. Making, resuming and finishing it are collective over all ranks."""

    def __init__(
        self, config: Config, world: World, *, num_steps: int, resolved_config: str, phase: str,
        started: float | None = None,
    ):  # fmt: skip
        """`phase` names what the steps do, such as sft or grpo. `started` is when the clock of the run's `seconds`
        began (`time.perf_counter`); now, unless given."""
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
        self.phase = phase
        self._health = HealthWatch()
        self._started = time.perf_counter() if started is None else started
        self._step_started = self._started
        if world.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / RESOLVED_CONFIG).write_text(resolved_config)
            devices = f"{world.size} x {world.device.kind}"
            write_summary(self.folder, verdict="running", versions=software_versions(), devices=devices)
        barrier()
        self.timeline = Timeline(timeline_file(self.folder, world.rank), world.rank, shown=self.console.stage)
        self.store = CheckpointStore(self.folder / CHECKPOINTS, config.checkpoint, is_main=world.is_main)
        self._metrics_log: MetricsLog | None = None
        self.samples_log: SamplesLog | None = None
        if world.is_main:
            self._metrics_log = MetricsLog(self.folder, config.log.backends, console=self.console)
            self.samples_log = SamplesLog(self.folder)

    def resume(self, state: Savable) -> None:
        """Take up the newest sound checkpoint that `resume` allows. Collective.

        Raises ValueError on every rank when the wanted checkpoint isn't there or belongs to another run.
        """
        folder = self._checkpoint_to_resume()
        # Each rank looks by itself: file systems may show an older state to some of them.
        self.world.agree(lambda: {"the checkpoint to go on from": str(folder)})
        if folder is None:
            # A run that died before its first checkpoint starts from nothing again.
            self._forget_after(-1)
            return
        record = json.loads((folder / RUN_FILE).read_text())
        self._check_same_run(record["identity"], folder)
        with self.console.doing("reading the checkpoint"):
            state.read_from(folder)
        self.start_step = record["step"]
        self.is_finished = record["is_finished"]
        self.first_metrics = record["first_metrics"]
        self.accuracy_before = record["accuracy_before"]
        self.accuracy_before_interval = record["accuracy_before_interval"]
        self.metrics = record["metrics"]
        self.last_step = self.start_step
        self.last_checkpoint = folder
        self._forget_after(self.start_step)
        self.console.note(f"resumed from {folder} after step {self.start_step}")

    def remaining_steps(self) -> Iterator[int]:
        """Steps still to do, numbered from 1."""
        self.console.start(self.num_steps, phase=self.phase, done_steps=self.start_step)
        for step in range(self.start_step + 1, self.num_steps + 1):
            if self.is_finished:
                return
            self._step_started = time.perf_counter()
            yield step

    def finish_step(self, step: int, state: Savable) -> None:
        """Write the step's metrics, then a checkpoint where one is due. Collective.

        In this order, a resumed run finds the metrics of every step that its checkpoint holds.
        """
        self.log_step(step)
        self.last_step = step
        interval = self.config.checkpoint.interval
        if step == self.num_steps or self.is_finished or (interval and step % interval == 0):
            self.save(step, state)

    def save(self, step: int, state: Savable) -> None:
        """Write a checkpoint; a failure costs none of the earlier ones, and the run goes on. Collective.

        Its metrics are those of the next step that is logged.
        """

        def write(folder: Path) -> list[Path]:
            paths = state.write_to(folder)
            if self.world.is_main:
                record = {
                    "step": step,
                    "is_finished": self.is_finished,
                    "identity": self.identity(),
                    "first_metrics": self.first_metrics,
                    "accuracy_before": self.accuracy_before,
                    "accuracy_before_interval": self.accuracy_before_interval,
                    "metrics": self.metrics,
                }
                (folder / RUN_FILE).write_text(json.dumps(record, indent=1, sort_keys=True))
                paths.append(folder / RUN_FILE)
            return paths

        started = time.perf_counter()
        with self.console.doing(f"saving the checkpoint of step {step}"), self.timeline.stage("checkpoint", step):
            result = self.store.save(step, write)
        self.recorder.maximum("checkpoint/seconds", time.perf_counter() - started)
        if result.folder is None:
            self.recorder.maximum("checkpoint/failed", 1.0)
            self.console.note(f"checkpoint of step {step} FAILED, the run goes on without it: {result.error}")
        else:
            self.recorder.maximum("checkpoint/bytes", float(result.num_bytes))
            size, seconds = bytes_text(result.num_bytes), duration(time.perf_counter() - started)
            self.console.note(f"checkpoint of step {step}: {size} in {seconds}, {result.folder}")
            self.last_checkpoint = result.folder

    def log_step(self, step: int) -> None:
        """Reduce the step's metrics over ranks and write them. Collective."""
        for stage, seconds in self.timeline.stage_seconds(step).items():
            self.recorder.maximum(f"time/{stage}", seconds)
        self.recorder.maximum("time/step", time.perf_counter() - self._step_started)
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
    def told_of_failure(self) -> Iterator[None]:
        """What ends this block early is written into summary and report, and goes on to the caller."""
        try:
            yield
        except BaseException as failure:
            self.console.close()
            if self.world.is_main:
                words = str(failure).splitlines()[:1]
                write_summary(self.folder, verdict="failed", error=": ".join([type(failure).__name__, *words]))
                write_report(self.folder)
            raise

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
        report = self.folder / "report.html"
        summary = {
            "verdict": verdict,
            "trouble": trouble_of(self.metrics) or None,
            "steps": self.last_step,
            "reward_first": self.first_metrics.get("reward"),
            "reward_last": self.metrics.get("reward"),
            "accuracy_before": self.accuracy_before,
            "accuracy_before_interval": self.accuracy_before_interval,
            "seconds": time.perf_counter() - self._started,
            "checkpoint": str(self.last_checkpoint / MODEL) if self.last_checkpoint else None,
            "report": str(report),
        }
        # What an earlier part of a resumed run has found out stays.
        known = {name: value for name, value in (summary | fields).items() if value is not None}
        write_summary(self.folder, **known)
        write_report(self.folder)
        self.console.summary(read_summary(self.folder), phase=self.phase)

    def identity(self) -> dict[str, object]:
        """What must not change between the parts of one run, or its steps would mean something else."""
        config = self.config
        return {
            "seed": config.seed,
            "rollout.prompts_per_step": config.rollout.prompts_per_step,
            "rollout.num_generations": config.rollout.num_generations,
            "data.train": str(config.data.train),
            "algo.name": config.algo.name,
        }

    def _check_same_run(self, identity: dict[str, object], folder: Path) -> None:
        differences = [
            f"{key} was {identity.get(key)!r} and is {value!r}"
            for key, value in self.identity().items()
            if identity.get(key) != value
        ]
        if differences:
            raise ValueError(
                f"{folder} belongs to another run: {'; '.join(differences)}; "
                "set run.name to a new name, or resume=never to start anew in this folder"
            )

    def _checkpoint_to_resume(self) -> Path | None:
        wanted = self.config.resume
        if wanted in ("auto", "never"):
            step, complaints = self.store.newest_sound()
            for complaint in complaints:
                self.console.note(f"WARNING: damaged checkpoint passed over: {complaint}")
            return None if step is None else self.store.folder_of(step)
        folder = self.store.folder_of(int(wanted)) if wanted.isdigit() else Path(wanted)
        problem = self.store.damage_of(folder)
        if problem is not None:
            steps = self.store.steps()
            raise ValueError(f"resume is {wanted!r}, but {folder} can't be used: {problem}; steps that can: {steps}")
        return folder

    def _forget_after(self, step: int) -> None:
        """Cut from the logs what will be done again. Collective."""
        self.timeline.truncate_after(step)
        if self._metrics_log is not None and self.samples_log is not None:
            self._metrics_log.truncate_after(step)
            self.samples_log.truncate_after(step)
        barrier()


def finished_model(folder: Path) -> Path | None:
    """The model that a run left in its folder, or None if it didn't come to its end."""
    return newest_model(folder) if read_summary(folder).get("verdict") == "done" else None


def put_earlier_run_aside(config: Config, world: World) -> None:
    """With `resume=never`, move what an earlier run left in the folder; nothing is deleted. Collective."""
    folder = config.run.folder
    if config.resume != "never":
        return
    if world.is_main and folder.exists():
        number = 1
        while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
            number += 1
        folder.rename(aside)
        Console().note(f"resume=never: the earlier run was moved to {aside}")
    barrier()
