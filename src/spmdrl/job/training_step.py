"""Builds what a step of training on rewards runs: its prompts, the dock and its worker states."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spmdrl.algorithms.algorithm import Algorithm
from spmdrl.config.config import Config
from spmdrl.dataflow.data.prompts import Prompt, PromptSource
from spmdrl.dataflow.samples.balancing.dealing import groups_of_generation, groups_of_training
from spmdrl.dataflow.samples.balancing.length_history import LengthHistory
from spmdrl.dataflow.samples.carried import CarriedGroups
from spmdrl.dataflow.samples.dock import TransferDock
from spmdrl.dataflow.samples.rounds import RoundRules
from spmdrl.dataflow.samples.run_account import RunAccount
from spmdrl.dataflow.stages.advantage import AdvantageStage
from spmdrl.dataflow.stages.critic_update import CriticUpdateStage
from spmdrl.dataflow.stages.inference import ScoreStage, score_stages
from spmdrl.dataflow.stages.judging import Judge, JudgeStage
from spmdrl.dataflow.stages.quarantine import Quarantine
from spmdrl.dataflow.stages.returns import ReturnsStage
from spmdrl.dataflow.stages.reward import RewardStage
from spmdrl.dataflow.stages.rollout.generation import GenerationStage
from spmdrl.dataflow.stages.rollout.partial import PartialGenerationStage
from spmdrl.dataflow.stages.rollout.portions import Portions
from spmdrl.dataflow.stages.rollout.recorded import RecordedGeneration
from spmdrl.dataflow.stages.rollout.refill import Refill
from spmdrl.dataflow.stages.rollout.turns import RolloutTurns
from spmdrl.dataflow.stages.stages import Stage, StageHook, Stages
from spmdrl.dataflow.stages.teacher import TeachersPrompts
from spmdrl.dataflow.stages.update import UpdatePlan, UpdateStage
from spmdrl.dataflow.stages.update_report import ShownRows
from spmdrl.engines.environment.environment_pool import EnvironmentPool
from spmdrl.engines.generation.native.row_steps import Lockstep
from spmdrl.engines.models.decoder import row_cost_of
from spmdrl.engines.models.renderer import Renderer
from spmdrl.engines.models.tokenizer import ModelTokenizer
from spmdrl.engines.reward.pool import RewardPool
from spmdrl.engines.training.checkpoints.file_writes import FileWrites, add_text
from spmdrl.job.model.replica import Replica, build_frozen_generator
from spmdrl.job.model.role_models import RoleModels
from spmdrl.job.model.switching import Switching
from spmdrl.job.rollouts.row_records import RowRecords
from spmdrl.job.run.run import Run
from spmdrl.job.start.prepared import Prepared
from spmdrl.job.start.start_checks import CheckedRun, agreement_of, credit_settings_of
from spmdrl.nouns.roles import CRITIC, JUDGE, POLICY, WorkerState
from spmdrl.observability.fault_points import faultpoint
from spmdrl.observability.terminal.console import Console
from spmdrl.resources.collectives import Arrivals
from spmdrl.resources.memory import MemoryLedger
from spmdrl.resources.mesh import build_generation_mesh
from spmdrl.resources.world import World
from spmdrl.runtime.workers.strikes import Strikes

_ALGORITHM_STATE = "algorithm.json"
PromptsOfStep = Callable[[int], tuple[Sequence[Prompt], Sequence[int]]]
"""The prompts of a step, and the ranks that go on with the first of them, where earlier steps began these."""


class StepAlgorithm:
    """The algorithm of the present step; what it adapts from step to step is a part of the run's state."""

    def __init__(self, algorithm: Algorithm, *, is_main: bool):
        self.now = algorithm
        self._first = algorithm
        self._next = algorithm
        self._is_main = is_main

    def adapt(self, values: Mapping[str, Any]) -> None:
        """Keep these values of keys that change for the next step."""
        self._next = replace(self._first, config=replace(self._first.config, **values)) if values else self._first

    def advance(self) -> None:
        """End the present step."""
        self.now = self._next

    def write_to(self, folder: Path, writes: FileWrites) -> None:
        """Write the keys that change, if there are any."""
        values = {key: getattr(self.now.config, key) for key in sorted(self.now.adapted_keys)}
        if values and self._is_main:
            add_text(writes, folder / _ALGORITHM_STATE, json.dumps(values) + "\n")

    def read_from(self, folder: Path) -> None:
        """Take back the keys that change; where an earlier part of the run changed none, they begin as configured."""
        saved = json.loads((folder / _ALGORITHM_STATE).read_text()) if (folder / _ALGORITHM_STATE).is_file() else {}
        self.adapt({key: float(saved[key]) for key in self._first.adapted_keys & saved.keys()})
        self.advance()


def build_turns(
    config: Config, replica: Replica, prepared: Prepared, world: World, stack: ExitStack,
    strikes: Strikes | None = None,
) -> RolloutTurns | None:  # fmt: skip
    """What lets an environment answer between turns, or None without one; its processes are closed with the stack."""
    if config.environment.function is None:
        return None
    pool = stack.enter_context(EnvironmentPool(config.environment, strikes=strikes)) if replica.mesh.is_leader else None
    tokenizer = prepared.tokenizer
    return RolloutTurns(
        pool, replica.mesh, lockstep=Lockstep(replica.mesh.expert, world.device.torch_device),
        decode=tokenizer.decode, decode_all=tokenizer.decode_all, encode=tokenizer.encode_foreign,
        vocab_size=prepared.source.decoder.vocab_size, return_after=config.environment.return_after_steps,
    )  # fmt: skip


def build_carried(config: Config, replica: Replica, console: Console, *, num_refills: int) -> CarriedGroups:
    """What holds the groups that a step begins and a later one finishes; empty so far."""
    rollout = config.rollout
    if rollout.partial_max_rounds > 1:
        console.note(
            f"rollout.partial_max_rounds {rollout.partial_max_rounds}: which prompts a step trains depends on the "
            f"number of replicas ({len(replica.mesh.leaders)} here); the same number repeats a run exactly, another "
            "trains as many"
        )
    rules = RoundRules(
        rollout.prompts_per_step,
        rollout.extra_prompts,
        rollout.partial_max_rounds,
        num_steps=config.train.max_steps,
        num_refills=num_refills,
    )
    return CarriedGroups(rules, replica.mesh)


def build_prompts_of_step(prompts: PromptSource, carried: CarriedGroups, account: RunAccount) -> PromptsOfStep:
    """The prompts in order, as many as a step trains or may begin; where groups take several steps, first those left.

    Raises ValueError where groups that take several steps are left and steps are to be refilled now.
    """
    if carried.known and carried.rules.num_refills:
        raise ValueError(
            f"algo.max_refills is {carried.rules.num_refills}, but an earlier part of the run, with "
            f"rollout.partial_max_rounds above 1, left {len(carried.known)} prompts to go on with; set "
            "algo.max_refills to 0 until a checkpoint has none"
        )

    def pending_and_new(step: int) -> tuple[list[Prompt], list[int]]:
        faultpoint("data")
        groups = carried.of_step(step)
        account.open(step, groups.serials)
        return [prompts.at(serial) for serial in groups.serials], groups.holders

    return pending_and_new


def build_judge(checked: CheckedRun, prepared: Prepared, run: Run, ledger: MemoryLedger) -> Judge | None:
    """The frozen model that judges responses, or None where there is none. Collective."""
    config, judge, source = checked.config, checked.config.reward.judge, prepared.sources.get(JUDGE)
    if judge is None or source is None:
        return None
    world = run.world
    mesh = build_generation_mesh(checked.judge_layout, world.device, world.size, world.rank)
    with run.console.doing("loading the judge"):
        generator = build_frozen_generator(
            config, source, world, ledger, mesh=mesh, owner=JUDGE.weights, kv_cache_gib=judge.kv_cache_gib
        )
    return Judge(judge, generator, mesh, Renderer(ModelTokenizer(source.folder)), source.decoder)


def build_dock(
    checked: CheckedRun, models: RoleModels, replica: Replica, judge: Judge | None, world: World, *,
    history: LengthHistory,
) -> TransferDock:  # fmt: skip
    """The sample flow, in which ranks share rows as the layout of each state's model groups them."""
    config, device = checked.config, world.device.torch_device
    roles = {state: checked.role_of(state) for state in checked.needs if state.uses_training_engine}
    meshes = {state: models[role].trainer.mesh for state, role in roles.items() if role is not None}
    row_groups = groups_of_training(meshes, device) | groups_of_generation(replica.mesh, device)
    if judge is not None:
        row_groups |= groups_of_generation(judge.mesh, device, WorkerState.JUDGE)
    cost = row_cost_of(models[POLICY].source.decoder)
    whole_groups = [WorkerState.UPDATE] if checked.algorithm.unit_size > 1 else []
    return TransferDock(
        world, checked.needs, config.dock,
        seed=config.seed, cost=cost, row_groups=row_groups, whole_groups=whole_groups,
        shares_prompts=models[POLICY].trainer.shares_prompts, history=history,
    )  # fmt: skip


@dataclass(frozen=True)
class StageParts:
    """What the worker states of a training run work with."""

    models: RoleModels
    replica: Replica
    turns: RolloutTurns | None
    carried: CarriedGroups
    pool: RewardPool
    tokenizer: ModelTokenizer
    switching: Switching
    shown: ShownRows
    records: RowRecords
    teachers_prompts: TeachersPrompts | None
    """those that the teacher sees; None: the policy's"""
    judge: Judge | None = None
    """the frozen model that judges responses, where there is one"""
    quarantine: Quarantine | None = None
    """prompts that aren't tried again"""


def build_stages(checked: CheckedRun, run: Run, parts: StageParts, algorithm: StepAlgorithm) -> Stages:
    """The worker states that make the algorithm's columns."""
    config, critic, recorder = checked.config, checked.config.critic, run.logs.recorder
    reward = RewardStage(
        parts.pool, config.reward, parts.tokenizer.decode, recorder, run.logs.timeline, parts.quarantine
    )
    attempts = None
    if parts.carried.rules.num_refills:
        settings, mesh = credit_settings_of(config), parts.replica.mesh
        attempts = Refill(parts.carried, checked.algorithm, settings, mesh, recorder).attempts
    scores = score_stages(
        checked.slots, {role: model.trainer for role, model in parts.models.items()}, parts.switching.present,
        parts.teachers_prompts.in_place if parts.teachers_prompts else None,
        num_likeliest=checked.algorithm.num_likeliest,
    )  # fmt: skip
    portions = None if attempts else _build_portions(checked, run, parts, list(scores.values()))
    plan = UpdatePlan(
        config.train.epochs_per_step, config.train.updates_per_step, config.rollout.max_completion_length,
        config.train.skip_zero_advantage, agreement_of(config), first_step=critic.warmup_steps + 1 if critic else 1,
    )  # fmt: skip
    advantage = AdvantageStage(recorder, credit_settings_of(config), parts.records)
    update = UpdateStage(parts.models[POLICY].trainer, plan, recorder, parts.shown)
    hooks: list[StageHook] = []
    stages: dict[WorkerState, Stage] = {
        WorkerState.GENERATION: _build_generation(checked, run, parts, reward, portions),
        WorkerState.REWARD: reward,
        WorkerState.ADVANTAGE: lambda samples: algorithm.adapt(advantage(samples, algorithm.now)),
        WorkerState.UPDATE: lambda samples: update(samples, algorithm.now, [hook.loss for hook in hooks]),
        **scores,
    }
    if parts.judge is not None:
        stages[WorkerState.JUDGE] = JudgeStage(parts.judge, parts.tokenizer.decode, recorder)
    if critic is not None:
        returns = ReturnsStage(critic, credit_settings_of(config))
        stages[WorkerState.RETURNS] = lambda samples: returns(samples, algorithm.now)
        stages[WorkerState.CRITIC_UPDATE] = CriticUpdateStage(parts.models[CRITIC].trainer, critic, plan, recorder)
    return Stages(checked.slots, stages, run.logs.timeline, parts.switching.note_memory, hooks=hooks, attempts=attempts)


def _build_portions(checked: CheckedRun, run: Run, parts: StageParts, scores: Sequence[ScoreStage]) -> Portions | None:
    """What scores groups that are whole while rows wait for an environment; None where no row does. Collective."""
    number, mesh = checked.config.dock.portions, parts.replica.mesh
    if parts.turns is None or not scores:
        return None
    obstacle = None
    if not checked.config.dock.fuse:
        obstacle = "as dock.fuse is false"
    elif parts.switching.swaps:
        obstacle = "as the training state leaves for generation"
    elif mesh.expert.size > 1:
        obstacle = "as replicas that share experts step together"
    when = f"after generation, {obstacle}" if obstacle else "while rows wait for the environment"
    run.console.note(f"{', '.join(stage.state.value for stage in scores)}: in {number} portions, {when}")
    arrivals = None if obstacle else Arrivals(run.world.timeout_seconds)
    return Portions(number, scores, mesh.tensor, run.logs.timeline, arrivals)


def _build_generation(
    checked: CheckedRun, run: Run, parts: StageParts, reward: RewardStage, portions: Portions | None
) -> Stage:
    config, mesh = checked.config, parts.replica.mesh
    sampling, debug = config.rollout.sampling(parts.tokenizer.stop_token_ids), config.debug
    generation = GenerationStage(
        engine=parts.replica.engine, mesh=mesh, sampling=sampling, seed=config.seed, listeners=[reward],
        recorder=run.logs.recorder, turns=parts.turns, portions=portions,
    )  # fmt: skip
    if parts.carried.is_used:
        lockstep = Lockstep(mesh.expert, run.world.device.torch_device)
        return PartialGenerationStage(**vars(generation), carried=parts.carried, lockstep=lockstep)
    if debug.rollouts_from or debug.rollouts_to:
        source, target = (Path(name) if name else None for name in (debug.rollouts_from, debug.rollouts_to))
        return RecordedGeneration(generation, source=source, target=target)
    return generation
