"""Evaluations while a model learns from pairs: which share of the held-out pairs it orders as preferred."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spmdrl.config.config import EvalConfig
from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.job.preferences.objectives import PairObjective
from spmdrl.job.run.run import Run
from spmdrl.observability.logs.outage import going_on_without
from spmdrl.observability.statistics import Estimate, wilson
from spmdrl.observability.summary import write_summary
from spmdrl.resources.device import to_host

PAIR_RULE = "share of held-out pairs whose preferred response is rated higher"


class HeldOutPairs:
    """Judges the held-out pairs. Its calls are collective over all ranks."""

    def __init__(self, pairs: Sequence[Prompt], objective: PairObjective, run: Run, config: EvalConfig):
        """Without pairs evaluations do nothing."""
        self._pairs = pairs[: config.max_rows]
        self._objective = objective
        self._run = run
        self._config = config
        self._last: Estimate | None = None

    def before(self) -> None:
        """The evaluation before the first step, with `eval.before_train`."""
        if self._pairs and self._run.start_step == 0 and self._config.before_train:
            self._run.begin_step()
            self._run.finish_evaluation_before(self._evaluate(0))

    def when_due(self, step: int) -> None:
        """The evaluation after a step: every `eval.interval` steps, and after the last one."""
        interval = self._config.interval
        if self._pairs and (self._run.is_last(step) or (interval and step % interval == 0)):
            self._last = self._evaluate(step)

    def summary(self) -> dict[str, object]:
        """The last evaluation's fields of summary.json."""
        if self._last is None:
            return {}
        interval = [self._last.low, self._last.high]
        return {
            "accuracy_after": self._last.value,
            "accuracy_after_interval": interval,
            "eval_prompts": len(self._pairs),
        }

    def _evaluate(self, step: int) -> Estimate:
        logs = self._run.logs
        with logs.timeline.stage("evaluation", step):
            num_right, loss = self._judged()
        accuracy = wilson(num_right, len(self._pairs))
        logs.recorder.mean("eval/accuracy", accuracy.value)
        logs.recorder.mean("eval/accuracy_low", accuracy.low)
        logs.recorder.mean("eval/accuracy_high", accuracy.high)
        logs.recorder.mean("eval/loss", loss)
        logs.console.note(
            f"held-out after step {step}: {accuracy.value:.3f} of {len(self._pairs)} pairs in order (95% "
            f"{accuracy.low:.3f} to {accuracy.high:.3f}), loss {loss:.4g}"
        )
        if logs.world.is_main:
            with going_on_without(f"the evaluation after step {step}"):
                write_summary(logs.folder, accuracy_rule=PAIR_RULE)
        return accuracy

    def _judged(self) -> tuple[float, float]:
        """How many pairs are in order, ties being half, and the mean loss. Collective."""
        data = self._objective.trainer.mesh.data
        # Evenly many on all ranks that have rows of their own, up to one.
        rows = self._objective.rows(self._pairs[data.rank :: data.size])
        found = self._objective.judge(rows)
        is_right, losses = to_host([found.metrics["preference/accuracy"], found.losses])
        num_right, loss = data.sum(torch.stack((is_right.double().sum(), losses.double().sum()))).tolist()
        return num_right, loss / len(self._pairs)
