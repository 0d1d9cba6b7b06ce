"""START HERE: the `train` verb. Builds the four layers bottom-up, then runs the loop, in verbs only."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace

from spmdrl.config.config import Config
from spmdrl.config.reader import ConfigError, LoadedConfig, start_up
from spmdrl.dataflow.samples.balancing.sharing import groups_of_generation, groups_of_training
from spmdrl.dataflow.samples.dock import TransferDock
from spmdrl.dataflow.stages.reward import RewardFailure
from spmdrl.dataflow.stages.shown import ShownRows
from spmdrl.dataflow.stages.stages import Stages
from spmdrl.engines.models.kernels.ops import compute_batch_invariantly
from spmdrl.engines.reward.pool import RewardPool
from spmdrl.job.building import (
    PromptsOfStep,
    Rollouts,
    StageParts,
    build_carried,
    build_evaluator,
    build_policys_replica,
    build_prompts_of_step,
    build_stages,
    build_switching,
    build_turns,
    warn_of_end_of_turn,
)
from spmdrl.job.evaluation.held_out import HeldOut
from spmdrl.job.model.model_source import ModelSource, agree_on_models, prepare_model
from spmdrl.job.model.role_models import ModelsAlone, build_role_models, saved_models
from spmdrl.job.model.switching import Switching
from spmdrl.job.rollouts.kept_rollouts import KeptRollouts
from spmdrl.job.rollouts.samples_report import SamplesReport, estimates_of
from spmdrl.job.run.outcome import WARM_START, finished_model
from spmdrl.job.run.run import Run
from spmdrl.job.run.run_folder import hold_folder_of_training
from spmdrl.job.run.savable import Savable, Together
from spmdrl.job.start.banner import banner
from spmdrl.job.start.prepared import prepare
from spmdrl.job.start.rank_facts import open_job
from spmdrl.job.start.start_checks import CheckedRun, check_run, turn_columns
from spmdrl.observability.terminal.console import Console
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.startup.launch import command_of
from spmdrl.resources.world import World, make_deterministic
from spmdrl.verbs.sft import admit_supervised, train_supervised


def main(loaded: LoadedConfig[Config]) -> int:
    """Train with rewards; the same command again goes on from the newest checkpoint."""
    started = time.perf_counter()
    checked = check_run(loaded, verb="train")
    if checked.config.debug.deterministic:
        make_deterministic()
    if checked.config.debug.batch_invariant:
        compute_batch_invariantly()
    with open_job(checked, "train") as world, hold_folder_of_training(checked.config, world):
        checked = warm_started(checked, world)
        run = Run(checked, world, started=started)
        with run.recording_failure(), ExitStack() as stack:
            with start_up():
                training = build(checked, run, stack)
            try:
                loop(training)
            except RewardFailure as failure:
                raise ConfigError(str(failure)) from failure
            run.finish(**training.held_out.summary())
            ask = command_of("generate", f"model.path={run.folder}", "prompt='...'")
            run.console.note(f"  next       {ask}")
    return 0


@dataclass(frozen=True)
class Training:
    """The parts that the loop calls."""

    run: Run
    checked: CheckedRun
    prompts_of_step: PromptsOfStep
    dock: TransferDock
    switching: Switching
    stages: Stages
    held_out: HeldOut
    kept_rollouts: KeptRollouts
    report: SamplesReport
    rollouts: Rollouts


def loop(training: Training) -> None:
    """Rollout, credit, update, until no step remains. Collective over all ranks."""
    run, switching, stages = training.run, training.switching, training.stages
    algorithm, num_generations = training.checked.algorithm, training.checked.config.rollout.num_generations
    training.held_out.before()
    for step in run.remaining_steps():
        prompts, holders = training.prompts_of_step(step)
        samples = training.dock.open_batch(step, prompts, num_generations, holders)
        if not training.kept_rollouts.take_up(samples):
            training.rollouts.begin_step(step)
            switching.to_generation(step)
            stages.generate(samples)
            training.rollouts.end_step(step)
            switching.start_return(step)
        for stage in stages.without_actor:
            stage(samples)
        switching.to_update(step)
        training.kept_rollouts.keep(samples)
        for stage in stages.with_actor:
            stage(samples)
        stages.credit(samples, algorithm)
        for stage in stages.with_credit:
            stage(samples)
        stages.update(samples, algorithm)
        training.report.write(samples)
        training.report.count(training.dock.close_batch(samples))
        training.held_out.when_due(step)
        run.finish_step(step)


def warm_started(checked: CheckedRun, world: World) -> CheckedRun:
    """With `sft.max_steps` > 0, train on answers first, in a run of its own below this one's folder. Collective."""
    config = checked.config
    if config.sft.max_steps == 0:
        return checked
    folder = config.run.folder / WARM_START
    inner = replace(
        config,
        run=replace(config.run, dir=str(folder)),
        checkpoint=replace(config.checkpoint, interval=0, model_only=False, best=None),
        resume="auto",
    )
    warm_start = replace(checked, config=inner, eval_rows=[], verb="sft")
    console = Console(enabled=world.is_main)
    model = finished_model(folder, world)
    if model is None:
        console.note(f"--- first sft: up to {config.sft.max_steps} supervised steps on the answers, a warm start ---")
        train_supervised(warm_start, world)
        model = finished_model(folder, world)
    else:
        with start_up():
            admit_supervised(warm_start, world)
    if model is None:
        raise ConfigError(f"the warm start left no checkpoint in {folder}: the disk refused it; free some")
    console.note(f"--- now {config.algo.name}: {config.train.max_steps} steps with rewards, from {model} ---")
    return replace(checked, config=replace(config, model=replace(config.model, path=str(model), make=None)))


def build(checked: CheckedRun, run: Run, stack: ExitStack) -> Training:
    """Build the layers bottom-up; what must be closed goes on the stack. Collective over all ranks."""
    config, world = checked.config, run.world
    with run.console.doing("reading the model's config, tokenizer and prompts"):
        prepared = prepare(checked, ModelSource.of(prepare_model(config, world)))
        agree_on_models(prepared.sources, world)
    source, tokenizer, prompts = prepared.source, prepared.tokenizer, prepared.prompts
    warn_of_end_of_turn(run.console, tokenizer, prompts)
    run.admit(prepared.sources)
    if world.is_main:
        for line in banner(checked, world, source, tokenizer, prompts, num_steps=run.num_steps, phase=checked.phase):
            run.console.note(line)
    mesh = build_update_mesh(checked.layout, world.device, world.rank)

    with run.console.doing("loading the weights"):
        models = build_role_models(config, prepared.sources, {"all": mesh}, world)
    with run.console.doing("starting the generation engine"):
        replica = build_policys_replica(checked, source, world)
    saved, carried = saved_models(models), build_carried(config, replica, run.console)
    state: Savable = ModelsAlone(saved) if config.checkpoint.model_only else Together(*saved, carried)
    run.resume(state)

    with run.console.doing("starting the rewards"):
        pool = stack.enter_context(RewardPool(config.reward))
    turns = build_turns(config, replica, prepared, world, stack)
    evaluator = build_evaluator(config, prepared, replica, pool, turns)
    num_rows = max(carried.rules.most_groups * config.rollout.num_generations, evaluator.num_rows if evaluator else 0)
    switching = build_switching(config, run, models, replica, stack, num_rows=num_rows, prompt_at=prompts.at)
    device = world.device.torch_device
    row_groups = groups_of_training(mesh, device) | groups_of_generation(replica.mesh, device)
    dock = stack.enter_context(TransferDock(world, checked.needs, config.dock, seed=config.seed, row_groups=row_groups))
    rollouts = Rollouts(config, replica, turns)
    shown = ShownRows(config.log.samples_per_step)
    sample_flow = estimates_of(config, checked.needs, world.num_nodes)
    run.logs.add_to_summary("the sample flow's estimates", sample_flow=sample_flow)
    parts = StageParts(models, rollouts, carried, pool, tokenizer, switching, shown)
    return Training(
        run=run,
        checked=checked,
        prompts_of_step=build_prompts_of_step(checked, prompts, carried),
        dock=dock,
        switching=switching,
        stages=build_stages(checked, run, parts),
        held_out=HeldOut(evaluator, switching, run, config.eval),
        kept_rollouts=KeptRollouts(
            run.checkpoints.store, run.logs, carried, identity=run.identity, start_step=run.start_step
        ),
        report=SamplesReport(
            run.logs, dock, shown, tokenizer.decode, rewards=config.reward.names, turns=turn_columns(config)
        ),
        rollouts=rollouts,
    )
