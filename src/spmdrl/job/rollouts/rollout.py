"""The part of a training run that generates responses and rewards them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from spmdrl.config.config import Config
from spmdrl.dataflow.samples.pending import PendingGroups
from spmdrl.dataflow.stages.inference import ScoreStage
from spmdrl.dataflow.stages.quarantine import Quarantine
from spmdrl.dataflow.stages.reward import RewardStage
from spmdrl.dataflow.stages.rollout.generation import GenerationStage
from spmdrl.dataflow.stages.rollout.in_flight import InFlightGenerationStage
from spmdrl.dataflow.stages.rollout.partial import PartialGenerationStage
from spmdrl.dataflow.stages.rollout.portions import build_portions
from spmdrl.dataflow.stages.rollout.recorded import RecordedGeneration
from spmdrl.dataflow.stages.rollout.refill import Refill
from spmdrl.dataflow.stages.rollout.turns import RolloutTurns, build_turns
from spmdrl.dataflow.stages.stages import Attempts, Stage
from spmdrl.engines.environment.journal import Journal
from spmdrl.engines.reward.pool import RewardPool
from spmdrl.job.model.replica import Replica
from spmdrl.job.run.run_logs import RunLogs
from spmdrl.job.start.checked_run import CheckedRun, credit_settings_of
from spmdrl.job.start.prepared import Prepared
from spmdrl.runtime.workers.strikes import Strikes


@dataclass(frozen=True)
class Rollout:
    """The generation state, and the state that waits for rewards."""

    pool: RewardPool
    generation: GenerationStage
    reward: RewardStage

    def stage(
        self, checked: CheckedRun, logs: RunLogs, pending: PendingGroups, scores: Sequence[ScoreStage], *, swaps: bool
    ) -> Stage:
        """Return the generation state; with an environment, ended rows are scored in portions. Collective.

        `swaps` is set if the training state is away during generation.
        """
        config, generation = checked.config, self.generation
        if generation.turns is not None and scores and not pending.rules.num_refills:
            portions = build_portions(
                config.dock.portions, scores, generation.mesh, logs.timeline, logs.console.note,
                fuse=config.dock.fuse, swaps=swaps, timeout_seconds=logs.world.timeout_seconds,
            )  # fmt: skip
            generation = replace(generation, portions=portions)
        if pending.is_used:
            return PartialGenerationStage.of(generation, pending, logs.world.device.torch_device)
        if config.rollout.swap_in_flight:
            return InFlightGenerationStage(**vars(generation), num_steps=config.rollout.swap_in_flight)
        if config.debug.rollouts_from or config.debug.rollouts_to:
            names = (config.debug.rollouts_from, config.debug.rollouts_to)
            source, target = (Path(name) if name else None for name in names)
            return RecordedGeneration(generation, source=source, target=target)
        return generation

    def attempts(self, checked: CheckedRun, pending: PendingGroups) -> Attempts | None:
        """Return the loop of a step that may generate more prompts in place of excluded ones."""
        if not pending.rules.num_refills:
            return None
        settings, own = credit_settings_of(checked.config), self.generation
        return Refill(pending, checked.algorithm, settings, own.mesh, own.recorder).attempts


def build_rollout(
    checked: CheckedRun, logs: RunLogs, prepared: Prepared, replica: Replica, stack: ExitStack,
    saved_steps: Callable[[], Sequence[int]], *, is_first: bool,
) -> Rollout:  # fmt: skip
    """Start the processes of rewards and environments, which are closed with the stack.

    Collective over the ranks that generate, one of which is the first.
    """
    config, world, tokenizer, strikes = checked.config, logs.world, prepared.tokenizer, Strikes()
    with logs.console.doing("starting the rewards"):
        pool = stack.enter_context(RewardPool(config.reward, strikes=strikes))
    journal = None
    if config.environment.key is not None and config.checkpoint.interval and replica.mesh.is_leader:
        journal = Journal(logs.folder, world.rank, logs.start_step, saved_steps)
    turns = turns_of(config, prepared, replica, world.device.torch_device, stack, strikes, journal)
    quarantine = Quarantine(strikes, logs.folder, is_main=is_first, start_step=logs.start_step)
    reward = RewardStage(pool, config.reward, tokenizer.decode, logs.recorder, logs.timeline, quarantine)
    generation = GenerationStage(
        engine=replica.engine, mesh=replica.mesh, sampling=config.rollout.sampling(tokenizer.stop_token_ids),
        seed=config.seed, listeners=[reward], recorder=logs.recorder, turns=turns,
    )  # fmt: skip
    return Rollout(pool, generation, reward)


def turns_of(
    config: Config, prepared: Prepared, replica: Replica, device: torch.device, stack: ExitStack,
    strikes: Strikes | None = None, journal: Journal | None = None,
) -> RolloutTurns | None:  # fmt: skip
    """Return the turns of a replica with the run's environment, closed with the stack; None without one."""
    return build_turns(
        config.environment, replica.mesh, prepared.renderer, device, stack,
        vocab_size=prepared.source.decoder.vocab_size, strikes=strikes, journal=journal,
    )  # fmt: skip


def check_rollouts(checked: CheckedRun) -> None:
    """Raise ValueError for sizes and options of a step that its rollouts and updates can't combine."""
    config, algorithm = checked.config, checked.algorithm
    rollout, train = config.rollout, config.train
    if rollout.temperature == 0:
        raise ValueError("rollout.temperature is 0, but training needs sampled responses; 1.0 is usual")
    if train.updates_per_step > rollout.prompts_per_step:
        raise ValueError(
            f"train.updates_per_step is {train.updates_per_step}, but a step has rollout.prompts_per_step = "
            f"{rollout.prompts_per_step} prompts, which can't be split so often; lower train.updates_per_step"
        )
    _check_sets(checked)
    if rollout.num_generations < algorithm.min_responses:
        raise ValueError(
            f"rollout.num_generations is {rollout.num_generations}, but {config.algo.name} compares the responses to "
            f"one prompt; set it to {algorithm.min_responses} or more (8 is usual)"
        )
    if algorithm.max_refills and rollout.partial_max_rounds > 1:
        raise ValueError(
            f"algo.max_refills is {algorithm.max_refills}, but rollout.partial_max_rounds is "
            f"{rollout.partial_max_rounds}: a step that leaves responses to later ones lacks the rewards by which "
            "prompts are replaced; set algo.max_refills to 0, or rollout.partial_max_rounds to 1"
        )
    if algorithm.max_refills and config.reward.model is not None:
        raise ValueError(
            f"algo.max_refills is {algorithm.max_refills}, but there is a reward.model, which scores "
            "responses only once generation has ended, and prompts are replaced by rewards before that; set "
            "algo.max_refills to 0"
        )
    continued = {"partial_max_rounds": rollout.partial_max_rounds > 1, "swap_in_flight": rollout.swap_in_flight > 0}
    if config.environment.program and (key := next(filter(continued.get, continued), None)):
        raise ValueError(
            f"rollout.{key} is {getattr(rollout, key)}, but {config.environment}, whose rows a later step can't go on "
            f"with, as it lacks their first messages; leave out rollout.{key}"
        )
    whole = {
        f"algo.name is {config.algo.name}, which compares whole rows": algorithm.unit_size > 1,
        "there is a reward.model, which rates whole rows": config.reward.model is not None,
        "teacher.prompt_column is the prompt of whole rows": config.teacher and config.teacher.prompt_column,
        **{f"rollout.{key} is {getattr(rollout, key)}, and a later step goes on with whole rows": value
           for key, value in continued.items()},
    }  # fmt: skip
    if config.environment.on_fork == "split" and (needed := next(filter(whole.get, whole), None)):
        raise ValueError(
            f"environment.on_fork is split, which trains on parts of a row as rows of their own, but {needed}; set "
            "environment.on_fork to keep, or change that"
        )
    if config.debug.rollouts_from and config.data.eval is not None:
        raise ValueError(
            "debug.rollouts_from replays recorded responses, but evaluations need a model that answers; "
            "set data.eval to null"
        )
    key = next((key for key in ("rollouts_from", "rollouts_to") if getattr(config.debug, key)), None)
    if key is not None and rollout.partial_max_rounds > 1:
        raise ValueError(
            f"rollout.partial_max_rounds is {rollout.partial_max_rounds}, but debug.{key} is about steps whose "
            f"responses are all of that step; set partial_max_rounds to 1 or leave out debug.{key}"
        )
    if key is not None and train.routing.replay == "rollout":
        raise ValueError(
            f"train.routing.replay is rollout, but the files of debug.{key} hold no experts; set train.routing.replay "
            f"to none or leave out debug.{key}"
        )


def _check_sets(checked: CheckedRun) -> None:
    """Raise ValueError for options that ranks which only generate, or only train, can't serve."""
    config, num_generating = checked.config, checked.config.resources.ranks.generation
    num_steps, num_rounds = config.rollout.swap_in_flight, config.rollout.partial_max_rounds
    if num_steps and config.rollout.lag == 0:
        raise ValueError(
            f"rollout.swap_in_flight is {num_steps}, but rollout.lag is 0: responses begin and end with the weights of "
            "their own step; set rollout.lag to 1, or leave out rollout.swap_in_flight"
        )
    if num_steps and num_rounds > 1:
        raise ValueError(
            f"rollout.swap_in_flight is {num_steps}, but rollout.partial_max_rounds is {num_rounds}: responses over "
            "several steps change weights already; leave out one of them"
        )
    if num_generating == 0:
        if config.rollout.lag:
            raise ValueError(
                f"rollout.lag is {config.rollout.lag}, but every rank trains and generates in turn, so that nothing "
                "could be generated meanwhile; set resources.ranks.generation to a number of ranks, or rollout.lag to 0"
            )
        return
    refused = {
        f"algo.max_refills is {checked.algorithm.max_refills}": checked.algorithm.max_refills > 0,
        "there is a reward.judge": config.reward.judge is not None,
        "checkpoint.keep_rollouts is true": config.checkpoint.keep_rollouts,
        "debug.rollouts_from is set": config.debug.rollouts_from is not None,
        "debug.rollouts_to is set": config.debug.rollouts_to is not None,
    }
    if conflict := next(filter(refused.get, refused), None):
        raise ValueError(
            f"resources.ranks.generation is {num_generating}, but {conflict}, which needs every rank to train and to "
            "generate so far; set resources.ranks.generation to 0, or change that"
        )
