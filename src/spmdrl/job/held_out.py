"""Evaluations during training: their schedule, methods and records."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from spmdrl.config.config import EvalConfig
from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.engines.reward.pool import RewardPool
from spmdrl.job.evaluator import ACCURACY_RULE, Evaluation, Evaluator, build_evaluator, write_records
from spmdrl.job.model.replica import build_policys_replica
from spmdrl.job.model.role_models import RoleModels
from spmdrl.job.model.switching import Switching, build_switching
from spmdrl.job.objectives import Objective, PairObjective
from spmdrl.job.rollouts.rollout import turns_of
from spmdrl.job.run.run import Run
from spmdrl.job.run.run_logs import RunLogs
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.job.start.prepared import Prepared
from spmdrl.nouns.statistics import Estimate, interval_of, wilson
from spmdrl.observability.outage import best_effort
from spmdrl.observability.summary import AT_K, read_summary, write_summary
from spmdrl.resources.device import to_host
from spmdrl.runtime.supervision.stop_request import StopAgreed

PAIR_RULE = "share of held-out pairs whose preferred response is rated higher"


@dataclass(frozen=True)
class Finding:
    """Result of an evaluation, the same on every rank."""

    text: str
    """for the screen"""
    estimates: Mapping[str, Estimate]
    """by metric below eval/, including the accuracy; NaN is omitted"""
    sizes: Mapping[str, int]
    """numbers of prompts and samples, for the summary of a completed run"""
    summary: Mapping[str, object]
    """fields of summary.json from then on, whatever ends the run"""
    records: Sequence[dict[str, Any]] = ()
    """the responses"""


class HeldOut:
    """Evaluation of the model on the held-out rows when due. Its calls are collective over all ranks."""

    def __init__(self, judge: Callable[[int], Finding] | None, run: Run, config: EvalConfig):
        """`judge` evaluates after a step; None, as without `data.eval`: evaluations do nothing."""
        self._judge = judge
        self._run = run
        self._config = config
        self._last: Finding | None = None

    def before(self) -> None:
        """Evaluate before the first step, with `eval.before_train`, or repeat an evaluation interrupted by a stop."""
        run = self._run
        if run.has_unlogged_step:
            run.begin_step()
            self._evaluate(run.start_step)
            run.finish_unlogged_step()
        if run.start_step == 0 and self._config.before_train:
            run.begin_step()
            self._evaluate(0)
            if self._last is not None:
                run.finish_evaluation_before(self._last.estimates["accuracy"])

    def when_due(self, step: int) -> None:
        """Evaluate after a step if due: every `eval.interval` steps, and after the last one."""
        interval = self._config.interval
        if self._run.is_last(step) or (interval and step % interval == 0):
            self._evaluate(step)

    def summary(self) -> dict[str, object]:
        """Return the last evaluation's fields of summary.json."""
        if self._last is None:
            return {}
        accuracy = self._last.estimates["accuracy"]
        interval = [accuracy.low, accuracy.high]
        return {"accuracy_after": accuracy.value, "accuracy_after_interval": interval, **self._last.sizes}

    def _evaluate(self, step: int) -> None:
        if self._judge is None:
            return
        logs, found = self._run.logs, self._judge(step)
        for name, estimate in found.estimates.items():
            for ending, value in {"": estimate.value, "_low": estimate.low, "_high": estimate.high}.items():
                if not math.isnan(value):
                    # The same number on every rank, so its mean over ranks doesn't change it.
                    logs.recorder.mean(f"eval/{name}{ending}", value)
        logs.console.note(f"held-out after step {step}: {found.text}")
        if logs.world.is_main:
            with best_effort(f"the evaluation after step {step}"):
                write_summary(logs.folder, **found.summary)
                if found.records:
                    write_records(logs.folder / "eval" / f"step_{step:06d}.jsonl", found.records)
        self._last = found


class AnswerJudge:
    """Judge of the policy's responses to the held-out prompts. Collective."""

    def __init__(self, evaluator: Evaluator, switching: Switching, run: Run):
        self._evaluator = evaluator
        self._switching = switching
        self._run = run

    def __call__(self, step: int) -> Finding:
        self._switching.to_generation(step)
        found: Evaluation | StopAgreed
        with self._run.logs.timeline.stage("evaluation", step):
            try:
                found = self._evaluator()
            except StopAgreed as agreed:
                found = agreed
        self._switching.start_return(step)
        self._switching.to_update(step)
        if isinstance(found, StopAgreed):
            self._run.stop_before_logging(step, found.reason)
        # Once any reward was neither 0 nor 1, no evaluation of this run has an accuracy.
        before = read_summary(self._run.folder).get("rewards_are_verdicts", True)
        evaluation, when = replace(found, is_verdict=found.is_verdict and before), "after" if step else "before"
        summary = {
            f"eval_reward_{when}": evaluation.mean_reward.value,
            f"eval_reward_{when}_interval": interval_of(evaluation.mean_reward),
            **evaluation.pass_fields(f"_{when}"),
            "rewards_are_verdicts": evaluation.is_verdict,
            "accuracy_rule": ACCURACY_RULE,
        }
        estimates = {"reward": evaluation.mean_reward, "accuracy": evaluation.accuracy}
        estimates |= {f"{AT_K}{k}": estimate for k, estimate in evaluation.pass_at.items()}
        sizes = {"eval_prompts": evaluation.num_prompts, "eval_num_samples": evaluation.num_samples}
        return Finding(evaluation.described(), estimates, sizes, summary, evaluation.records)


class PairJudge:
    """Judge by the share of held-out pairs that the model orders as preferred. Collective."""

    def __init__(self, pairs: Sequence[Prompt], objective: PairObjective, logs: RunLogs):
        self._pairs = pairs
        self._objective = objective
        self._logs = logs

    def __call__(self, step: int) -> Finding:
        data, num_pairs = self._objective.trainer.mesh.data, len(self._pairs)
        with self._logs.timeline.stage("evaluation", step):
            # Even shares, up to one, over the ranks with rows of their own.
            found = self._objective.judge(self._objective.rows(self._pairs[data.rank :: data.size]))
            is_right, losses = to_host([found.metrics["preference/accuracy"], found.losses])
            num_right, loss = data.sum(torch.stack((is_right.double().sum(), losses.double().sum()))).tolist()
        # Ties count half.
        accuracy, loss = wilson(num_right, num_pairs), loss / num_pairs
        text = (
            f"{accuracy.value:.3f} of {num_pairs} pairs in order (95% {accuracy.low:.3f} to {accuracy.high:.3f}), "
            f"loss {loss:.4g}"
        )
        self._logs.recorder.mean("eval/loss", loss)
        return Finding(text, {"accuracy": accuracy}, {"eval_prompts": num_pairs}, {"accuracy_rule": PAIR_RULE})


def build_held_out(
    checked: CheckedRun, run: Run, models: RoleModels, prepared: Prepared, objective: Objective, stack: ExitStack
) -> HeldOut:
    """Build evaluations of a model used for nothing else; resources are closed with the stack. Collective."""
    config = checked.config
    if prepared.held_out is None:
        return HeldOut(None, run, config.eval)
    if isinstance(objective, PairObjective):
        pairs = list(prepared.held_out.all())[: config.eval.max_rows]
        return HeldOut(PairJudge(pairs, objective, run.logs), run, config.eval)
    replica = build_policys_replica(checked, prepared.source, run.world)
    pool = stack.enter_context(RewardPool(config.reward))
    turns = turns_of(config, prepared, replica, run.world.device.torch_device, stack)
    evaluator = build_evaluator(config, prepared, replica, pool, turns)
    assert evaluator is not None, "there are held-out rows"
    prompts = evaluator.prompts
    switching = build_switching(
        config, run.logs, models, replica, prepared.source, stack,
        num_rows=evaluator.num_rows, prompt_at=lambda position: prompts[position % len(prompts)],
    )  # fmt: skip
    return HeldOut(AnswerJudge(evaluator, switching, run), run, config.eval)
