"""The loop of the verbs whose rows are given, not generated: one optimizer step after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from spmdrl.engines.training.training_engine import UpdateResult
from spmdrl.job.run.run import Run
from spmdrl.observability.metrics import Recorder


class HeldOutRows(Protocol):
    """Rows that are never trained on, judged at the times that the config gives."""

    def before(self) -> None: ...
    def when_due(self, step: int) -> None: ...


def take_steps(run: Run, update: Callable[[int], UpdateResult], held_out: HeldOutRows) -> None:
    """Take the steps that remain, each by `update` with its number. Collective over all ranks."""
    held_out.before()
    for step in run.remaining_steps():
        with run.logs.timeline.stage("update", step):
            result = update(step)
        _report(run.logs.recorder, result, num_ranks=run.world.size)
        held_out.when_due(step)
        run.finish_step(step)


def _report(recorder: Recorder, result: UpdateResult, *, num_ranks: int) -> None:
    """Record what every rank holds alike."""
    recorder.mean("loss", result.loss)
    recorder.mean("grad_norm", result.grad_norm)
    recorder.mean("lr", result.lr)
    recorder.alike("update/count", 1)
    recorder.alike("update/skipped", result.skipped)
    metrics = dict(result.metrics)
    recorder.total("perf/tokens", metrics.pop("tokens")[0] / num_ranks)
    for name, (total, count) in metrics.items():
        recorder.mean(name, total / max(count, 1.0))
