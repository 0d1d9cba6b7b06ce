"""A run's checkpoints: written when they are due, at no cost to earlier ones, with a link that leads to the best."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from spmdrl.engines.training.checkpoints.checkpoint import CheckpointStore
from spmdrl.job.run.best_checkpoint import LINK, BestStep, best_of, is_due_for_best, point_to, unknown_metric
from spmdrl.job.run.resuming import RUN_FILE, ResumePoint, RunRecord
from spmdrl.job.run.run_logs import RunLogs
from spmdrl.job.run.savable import Savable
from spmdrl.observability.logs.jsonl import JsonlWriter
from spmdrl.observability.logs.log import CHECKPOINTS_FILE
from spmdrl.observability.logs.outage import going_on_without
from spmdrl.observability.terminal.units import bytes_text, duration


class Checkpoints:
    """Saves the state of a run, and remembers whether the last save failed."""

    def __init__(self, store: CheckpointStore, state: Savable, logs: RunLogs, point: ResumePoint | None):
        """`state` is what checkpoints hold. The best steps are those up to `point`: later ones come again."""
        self.store = store
        self.newest = point.folder if point else None
        """the folder of the newest checkpoint"""
        self._state = state
        self._logs = logs
        self.best = best_of(store.config, point.record.best if point else (), 0, {})
        """the steps that are kept for their values, the best one first"""
        self._is_best_unknown = False
        """whether it was noted that no step has the metric of `checkpoint.best`"""
        self._failed_save: tuple[int, str] | None = None
        """the last checkpoint's step, and why it could not be written"""
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
        """Whether a step is saved for its number, or for the value of its metric."""
        config = self.store.config
        is_nth = config.interval > 0 and step % config.interval == 0
        return is_nth or is_due_for_best(config, self.best, step, metrics)

    def save(self, record: RunRecord, texts: Mapping[str, str]) -> None:
        """Write a checkpoint with `texts` by file name; a failure costs none of the earlier ones. Collective.

        Its metrics are those of the next step that is logged; checkpoints.jsonl has them under its own step.
        """
        step, config, logs = record.step, self.store.config, self._logs
        best = best_of(config, self.best, step, record.metrics)
        record = replace(record, best=best, is_resumable=not config.model_only)

        def write(folder: Path) -> list[Path]:
            paths = self._state.write_to(folder)
            if logs.world.is_main:
                for name, content in ({RUN_FILE: record.to_json()} | dict(texts)).items():
                    (folder / name).write_text(content, encoding="utf-8")
                    paths.append(folder / name)
            return paths

        started = time.perf_counter()
        with logs.console.doing(f"saving the checkpoint of step {step}"), logs.timeline.stage("checkpoint", step):
            result = self.store.save(step, write)
        seconds = time.perf_counter() - started
        if self._log is not None:
            name = result.folder.name if result.folder else None
            self._log.write(
                {"step": step, "seconds": seconds, "bytes": result.num_bytes, "folder": name, "error": result.error}
            )
        logs.recorder.maximum("checkpoint/seconds", seconds)
        if result.folder is None:
            self._failed_save = (step, str(result.error))
            logs.recorder.maximum("checkpoint/failed", 1.0)
            logs.console.note(f"WARNING: checkpoint of step {step} FAILED, the run goes on without it: {result.error}")
            return
        logs.recorder.maximum("checkpoint/bytes", float(result.num_bytes))
        size = bytes_text(result.num_bytes)
        logs.console.note(f"checkpoint of step {step}: {size} in {duration(seconds)}, {result.folder}")
        self.newest, self._failed_save = result.folder, None
        self._take_best(best, step, record.metrics)
        # Once the link leads elsewhere.
        self.store.forget_old(step, kept=[one.step for one in best])

    def trouble(self) -> list[str]:
        """What a run's outcome must not hide."""
        if self._failed_save is None:
            return []
        step, reason = self._failed_save
        return [f"the checkpoint of step {step}, the last one, could not be written ({reason})"]

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def _take_best(self, best: tuple[BestStep, ...], step: int, metrics: Mapping[str, float]) -> None:
        """Point the link at the best checkpoint, now that it is there."""
        config, logs, self.best = self.store.config, self._logs, best
        for place, one in enumerate(best, 1):
            if one.step == step:
                which = f"the best so far, kept as {LINK}" if place == 1 else f"number {place} of the best, kept"
                logs.console.note(f"{one.metric} {one.value:.6g} of step {step} is {which}")
        if best and best[0].step == step and logs.world.is_main:
            with going_on_without(f"the link {LINK}"):
                point_to(best[0], self.store.root)
        if config.best_metric is not None and not best and not self._is_best_unknown:
            warning = unknown_metric(config.best_metric, metrics)
            self._is_best_unknown = warning is not None
            if warning is not None:
                logs.console.note(warning)
