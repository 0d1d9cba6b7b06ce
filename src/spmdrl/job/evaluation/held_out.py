"""Evaluations while a model is trained: switch, answer, switch back, and write down what came out."""

from __future__ import annotations

import math
from dataclasses import replace

from spmdrl.config.config import EvalConfig
from spmdrl.job.evaluation.evaluator import ACCURACY_RULE, Evaluation, Evaluator, write_records
from spmdrl.job.model.switching import Switching
from spmdrl.job.run.run import Run
from spmdrl.observability.logs.outage import going_on_without
from spmdrl.observability.statistics import interval_of
from spmdrl.observability.summary import AT_K, read_summary, write_summary
from spmdrl.runtime.supervision.stop_request import StopAgreed


class HeldOut:
    """Evaluates the policy on the held-out rows. Its calls are collective over all ranks."""

    def __init__(self, evaluator: Evaluator | None, switching: Switching | None, run: Run, config: EvalConfig):
        """Without both of the first two, as without `data.eval`, evaluations do nothing."""
        self._evaluator = evaluator
        self._switching = switching
        self._run = run
        self._config = config
        self.last: Evaluation | None = None

    def before(self) -> None:
        """The evaluation before the first step, with `eval.before_train`, or the one that a stop left undone."""
        if self._run.has_unlogged_step:
            self._run.begin_step()
            self._evaluate(self._run.start_step)
            self._run.finish_unlogged_step()
        if self._run.start_step == 0 and self._config.before_train:
            self._run.begin_step()
            evaluation = self._evaluate(0)
            if evaluation is not None:
                self._run.finish_evaluation_before(evaluation.accuracy)

    def when_due(self, step: int) -> None:
        """The evaluation after a step: every `eval.interval` steps, and after the last one."""
        interval = self._config.interval
        if self._run.is_last(step) or (interval and step % interval == 0):
            self._evaluate(step)

    def summary(self) -> dict[str, object]:
        """The last evaluation's fields of summary.json."""
        if self.last is None:
            return {}
        accuracy = self.last.accuracy
        return {
            "accuracy_after": accuracy.value,
            "accuracy_after_interval": [accuracy.low, accuracy.high],
            "eval_prompts": self.last.num_prompts,
            "eval_num_samples": self.last.num_samples,
        }

    def _evaluate(self, step: int) -> Evaluation | None:
        logs, switching = self._run.logs, self._switching
        if self._evaluator is None or switching is None:
            return None
        switching.to_generation(step)
        found: Evaluation | StopAgreed
        with logs.timeline.stage("evaluation", step):
            try:
                found = self._evaluator()
            except StopAgreed as agreed:
                found = agreed
        switching.start_return(step)
        switching.to_update(step)
        if isinstance(found, StopAgreed):
            self._run.stop_before_logging(step, found.reason)
        evaluation = self._all_verdicts(found)
        passes = {f"{AT_K}{k}": estimate for k, estimate in evaluation.pass_at.items()}
        for name, estimate in ({"reward": evaluation.mean_reward, "accuracy": evaluation.accuracy} | passes).items():
            parts = {"": estimate.value, "_low": estimate.low, "_high": estimate.high}
            for ending, value in parts.items():
                if not math.isnan(value):
                    # The same number on every rank: recorded as a mean, it stays what it is.
                    logs.recorder.mean(f"eval/{name}{ending}", value)
        logs.console.note(f"held-out after step {step}: {evaluation.described()}")
        if logs.world.is_main:
            path = logs.folder / "eval" / f"step_{step:06d}.jsonl"
            with going_on_without(f"the evaluation after step {step}"):
                write_summary(logs.folder, **_fields(evaluation, "after" if step else "before"))
                write_records(path, evaluation.records)
        self.last = evaluation
        return evaluation

    def _all_verdicts(self, evaluation: Evaluation) -> Evaluation:
        """Once any reward was neither 0 nor 1, no evaluation of this run has an accuracy."""
        before = read_summary(self._run.folder).get("rewards_are_verdicts", True)
        return replace(evaluation, is_verdict=evaluation.is_verdict and before)


def _fields(evaluation: Evaluation, when: str) -> dict[str, object]:
    """What a run's summary keeps of an evaluation from then on, whatever ends the run."""
    return {
        f"eval_reward_{when}": evaluation.mean_reward.value,
        f"eval_reward_{when}_interval": interval_of(evaluation.mean_reward),
        **evaluation.pass_fields(f"_{when}"),
        "rewards_are_verdicts": evaluation.is_verdict,
        "accuracy_rule": ACCURACY_RULE,
    }
