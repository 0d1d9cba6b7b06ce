"""The worker states of a training run that score responses, and those that learn from them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from spmdrl.algorithms.algorithm import Algorithm
from spmdrl.dataflow.stages.advantage import AdvantageStage
from spmdrl.dataflow.stages.critic_states import CriticUpdateStage, ReturnsStage
from spmdrl.dataflow.stages.inference import ScoreStage, score_stages
from spmdrl.dataflow.stages.judging import Judge, JudgeStage
from spmdrl.dataflow.stages.stages import Stage, StageHook
from spmdrl.dataflow.stages.update import UpdatePlan, UpdateStage
from spmdrl.engines.models.renderer import Renderer
from spmdrl.engines.models.tokenizer import ModelTokenizer
from spmdrl.engines.training.checkpoints.file_writes import FileWrites, add_text
from spmdrl.job.model.replica import build_frozen_generator
from spmdrl.job.model.role_models import RoleModels
from spmdrl.job.model.switching import Switching
from spmdrl.job.rollouts.samples_report import SamplesReport
from spmdrl.job.run.run_logs import RunLogs
from spmdrl.job.start.checked_run import CheckedRun, agreement_of, credit_settings_of
from spmdrl.job.start.prepared import Prepared
from spmdrl.nouns.roles import CRITIC, JUDGE, POLICY, WorkerState
from spmdrl.resources.memory import MemoryLedger
from spmdrl.resources.mesh import build_generation_mesh


def scoring_states(
    checked: CheckedRun, models: RoleModels, switching: Switching, prepared: Prepared
) -> dict[WorkerState, ScoreStage]:
    """Return the states in which a model scores responses."""
    engines, teachers = {role: model.trainer for role, model in models.items()}, prepared.teachers_prompts
    return score_stages(
        checked.slots, engines, switching.present, teachers.in_place if teachers else None,
        num_likeliest=checked.algorithm.num_likeliest,
    )  # fmt: skip


def judging_state(checked: CheckedRun, prepared: Prepared, logs: RunLogs, ledger: MemoryLedger) -> JudgeStage | None:
    """Return the state in which a frozen model judges responses, or None without a judge. Collective."""
    config, judge, source, world = checked.config, checked.config.reward.judge, prepared.sources.get(JUDGE), logs.world
    if judge is None or source is None:
        return None
    mesh = build_generation_mesh(checked.judge_layout, world.device, world.size, world.rank)
    with logs.console.doing("loading the judge"):
        generator = build_frozen_generator(
            config, source, world, ledger, mesh=mesh, owner=JUDGE.weights, kv_cache_gib=judge.kv_cache_gib
        )
    frozen = Judge(judge, generator, mesh, Renderer(ModelTokenizer(source.folder)), source.decoder)
    return JudgeStage(frozen, prepared.tokenizer.decode, logs.recorder)


def learning_states(
    checked: CheckedRun, models: RoleModels, logs: RunLogs, algorithm: StepAlgorithm, report: SamplesReport,
    hooks: Sequence[StageHook],
) -> dict[WorkerState, Stage]:  # fmt: skip
    """Return the states that credit responses with their rewards and train on them."""
    config, critic, recorder = checked.config, checked.config.critic, logs.recorder
    settings = credit_settings_of(config)
    plan = UpdatePlan(
        config.train.epochs_per_step, config.train.updates_per_step, config.rollout.max_completion_length,
        config.train.skip_zero_advantage, agreement_of(config), first_step=critic.warmup_steps + 1 if critic else 1,
    )  # fmt: skip
    advantage = AdvantageStage(recorder, settings, report.records)
    update = UpdateStage(models[POLICY].trainer, plan, recorder, report.shown)
    states: dict[WorkerState, Stage] = {
        WorkerState.ADVANTAGE: lambda samples: algorithm.adapt(advantage(samples, algorithm.now)),
        WorkerState.UPDATE: lambda samples: update(samples, algorithm.now, [hook.loss for hook in hooks]),
    }
    if critic is not None:
        returns = ReturnsStage(critic, settings)
        states[WorkerState.RETURNS] = lambda samples: returns(samples, algorithm.now)
        states[WorkerState.CRITIC_UPDATE] = CriticUpdateStage(models[CRITIC].trainer, critic, plan, recorder)
    return states


_ALGORITHM_STATE = "algorithm.json"


class StepAlgorithm:
    """The algorithm of the present step; its adapted keys are part of the run's state."""

    def __init__(self, algorithm: Algorithm, *, is_main: bool):
        self.now = algorithm
        self._first = algorithm
        self._next = algorithm
        self._is_main = is_main

    def adapt(self, values: Mapping[str, Any]) -> None:
        """Keep these values of changing keys for the next step."""
        self._next = replace(self._first, config=replace(self._first.config, **values)) if values else self._first

    def advance(self) -> None:
        """End the present step."""
        self.now = self._next

    def write_to(self, folder: Path, writes: FileWrites) -> None:
        """Write the changing keys, if there are any."""
        values = {key: getattr(self.now.config, key) for key in sorted(self.now.adapted_keys)}
        if values and self._is_main:
            add_text(writes, folder / _ALGORITHM_STATE, json.dumps(values) + "\n")

    def read_from(self, folder: Path) -> None:
        """Restore the changing keys; those that an earlier part of the run didn't change start as configured."""
        saved = json.loads((folder / _ALGORITHM_STATE).read_text()) if (folder / _ALGORITHM_STATE).is_file() else {}
        self.adapt({key: float(saved[key]) for key in self._first.adapted_keys & saved.keys()})
        self.advance()
