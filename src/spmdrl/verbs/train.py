"""START HERE: the `train` verb. Builds the four layers bottom-up, then runs the loop, in verbs only."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from spmdrl.config.config import Config
from spmdrl.config.reader import ConfigError, LoadedConfig, start_up
from spmdrl.dataflow.samples.balancing.length_history import LengthHistory
from spmdrl.dataflow.samples.carried import CarriedGroups
from spmdrl.dataflow.samples.dock import TransferDock
from spmdrl.dataflow.samples.run_account import RunAccount
from spmdrl.dataflow.stages.quarantine import Quarantine
from spmdrl.dataflow.stages.reward import RewardFailure
from spmdrl.dataflow.stages.schedule import Phase
from spmdrl.dataflow.stages.stages import Stages
from spmdrl.dataflow.stages.update_report import ShownRows
from spmdrl.engines.generation.protocol import GenerationEngine
from spmdrl.engines.models.kernels.ops import compute_batch_invariantly
from spmdrl.engines.models.tokenizer import ModelTokenizer
from spmdrl.engines.reward.pool import RewardPool
from spmdrl.job.evaluator import build_evaluator
from spmdrl.job.held_out import AnswerJudge, HeldOut
from spmdrl.job.model.replica import build_policys_replica
from spmdrl.job.model.role_models import build_role_models, saved_state
from spmdrl.job.model.shared_limit import share_limit
from spmdrl.job.model.switching import Switching, build_switching
from spmdrl.job.rollouts.kept_rollouts import KeptRollouts
from spmdrl.job.rollouts.row_records import RowRecords
from spmdrl.job.rollouts.samples_report import SamplesReport, estimates_of
from spmdrl.job.rollouts.skipped_batches import keep_skipped_batches
from spmdrl.job.run.outcome import WARM_START
from spmdrl.job.run.run import Run
from spmdrl.job.run.run_folder import hold_folder_of_training
from spmdrl.job.start.banner import print_banner
from spmdrl.job.start.prepared import prepare_together, prepare_without_weights
from spmdrl.job.start.rank_facts import open_job
from spmdrl.job.start.start_checks import CheckedRun, check_run
from spmdrl.job.training_step import (
    PromptsOfStep,
    StageParts,
    StepAlgorithm,
    build_carried,
    build_dock,
    build_judge,
    build_prompts_of_step,
    build_stages,
    build_turns,
)
from spmdrl.nouns.roles import POLICY
from spmdrl.resources.world import make_deterministic
from spmdrl.runtime.launch import command_of
from spmdrl.runtime.supervision.stop_request import StopAgreed
from spmdrl.runtime.workers.strikes import Strikes
from spmdrl.verbs.supervised import warm_started


def main(loaded: LoadedConfig[Config]) -> int:
    """Train with rewards; the same command again goes on from the newest checkpoint."""
    started = time.perf_counter()
    config, checked = loaded.value, check_run(loaded, verb="train")
    is_here = config.model.path is None or Path(config.model.path).expanduser().is_dir()
    if config.sft.max_steps and is_here and not (config.run.folder / WARM_START).exists():
        # What the steps with rewards can't do is refused before the supervised ones.
        prepare_without_weights(checked)
    if config.debug.deterministic:
        make_deterministic()
    if config.debug.batch_invariant:
        compute_batch_invariantly()
    with open_job(checked) as world, hold_folder_of_training(config.run, world, resume=config.resume):
        checked = warm_started(checked, world)
        run = Run(checked, world, started=started)
        with run.recording_failure(), ExitStack() as stack:
            with start_up():
                training = build(checked, run, stack)
            try:
                loop(training)
            except RewardFailure as failure:
                raise ConfigError(str(failure)) from failure
            except StopAgreed as agreed:
                abandon_step(training, agreed.reason)
            run.finish(**training.held_out.summary())
            answer = command_of("generate", f"model.path={run.folder}", "prompt='...'")
            run.console.note(f"  next       {answer}")
    return 0


@dataclass(frozen=True)
class Training:
    """The parts that the loop calls."""

    run: Run
    checked: CheckedRun
    algorithm: StepAlgorithm
    prompts_of_step: PromptsOfStep
    account: RunAccount
    dock: TransferDock
    switching: Switching
    stages: Stages
    held_out: HeldOut
    engine: GenerationEngine
    carried: CarriedGroups
    kept_rollouts: KeptRollouts
    report: SamplesReport
    tokenizer: ModelTokenizer


# One step. At each `|` all ranks commit: what one of them put is there for the states that read it.
#
#   rank       switch | generate           | reference    | old log-probs | reward       | credit     | update
#   waits for  slices | its engine         |              | weights       | its children | all rows   | all gradients
#   puts              | responses          | ref_logprobs | old_logprobs  | rewards      | advantages | nothing
#   children          | score each response as it ends . . . . . . . . . > |
#   meanwhile         | reference, old log-probs of whole groups, while rows wait for an environment
#   device     generation's weights, cache | update weights return > . . . . . . . . . . . . . . . . . . . . . .


def loop(training: Training) -> None:
    """Rollout, credit, update, until no step remains. Collective over all ranks."""
    run, switching, stages = training.run, training.switching, training.stages
    num_generations = training.checked.config.rollout.num_generations
    training.held_out.before()
    for step in run.remaining_steps():
        prompts, holders = training.prompts_of_step(step)
        samples = training.dock.open_batch(step, prompts, num_generations, holders)
        if not training.kept_rollouts.take_up(samples):
            switching.to_generation(step)
            stages.run(Phase.GENERATION, samples)
            switching.start_return(step)
        stages.run(Phase.WITHOUT_ACTOR, samples)
        switching.to_update(step)
        stages.run(Phase.WITH_ACTOR, samples)
        training.kept_rollouts.keep(samples)
        stages.run(Phase.UPDATE, samples)
        training.algorithm.advance()
        training.report.count(training.account.close(training.dock.close_batch(samples)))
        training.held_out.when_due(step)
        run.finish_step(step)


def abandon_step(training: Training, reason: str) -> NoReturn:
    """Leave a step that has trained nothing yet, save the one before, and raise Stopped. Collective over all ranks.

    The same command does the step again, to the bit.
    """
    if training.engine.num_unfinished:
        # Ranks may have agreed in the middle of generation, as they announced a portion.
        training.engine.abort()
    training.carried.undo_step()
    training.switching.to_update(training.run.present_step)
    training.run.stop(reason)


def build(checked: CheckedRun, run: Run, stack: ExitStack) -> Training:
    """Build the layers bottom-up; what must be closed goes on the stack. Collective over all ranks."""
    config, world = checked.config, run.world
    prepared = prepare_together(checked, world, run.console)
    run.admit(prepared.sources)
    print_banner(checked, prepared, world, run.console)
    tokenizer, prompts = prepared.tokenizer, prepared.prompts
    with run.console.doing("loading the weights"):
        models = build_role_models(checked, prepared.sources, world)
    with run.console.doing("starting the generation engine"):
        replica = build_policys_replica(checked, prepared.source, world)
    carried = build_carried(config, replica, run.console, num_refills=checked.algorithm.max_refills)
    algorithm = StepAlgorithm(checked.algorithm, is_main=world.is_main)
    history = LengthHistory(is_main=world.is_main)
    account = RunAccount(config.rollout.num_generations, is_main=world.is_main)
    run.resume(saved_state(config.checkpoint, models, carried, algorithm, history, account))
    keep_skipped_batches(models, run)
    share_limit(models, run)

    strikes = Strikes()
    with run.console.doing("starting the rewards"):
        pool = stack.enter_context(RewardPool(config.reward, strikes=strikes))
    turns = build_turns(config, replica, prepared, world, stack, strikes)
    quarantine = Quarantine(strikes, run.folder, is_main=world.is_main, start_step=run.start_step)
    evaluator = build_evaluator(config, prepared, replica, pool, turns)
    num_rows = max(carried.rules.most_groups * config.rollout.num_generations, evaluator.num_rows if evaluator else 0)
    switching = build_switching(config, run.logs, models, replica, stack, num_rows=num_rows, prompt_at=prompts.at)
    judge = build_judge(checked, prepared, run, switching.ledger)
    dock = stack.enter_context(build_dock(checked, models, replica, judge, world, history=history))
    records = stack.enter_context(RowRecords(run.folder, world, models[POLICY].trainer.mesh, last_step=run.start_step))
    shown = ShownRows(config.log.samples_per_step, records)
    sample_flow = estimates_of(config, checked.needs, world.num_nodes)
    run.logs.add_to_summary("the sample flow's estimates", sample_flow=sample_flow)
    parts = StageParts(
        models,
        replica,
        turns,
        carried,
        pool,
        tokenizer,
        switching,
        shown,
        records,
        prepared.teachers_prompts,
        judge,
        quarantine,
    )
    stages = build_stages(checked, run, parts, algorithm)
    report = SamplesReport(run.logs, dock, shown, records, tokenizer.decode, rewards=config.reward.names)
    stages.hooks.append(report)
    return Training(
        run=run,
        checked=checked,
        algorithm=algorithm,
        prompts_of_step=build_prompts_of_step(prompts, carried, account),
        account=account,
        dock=dock,
        switching=switching,
        stages=stages,
        held_out=HeldOut(AnswerJudge(evaluator, switching, run) if evaluator else None, run, config.eval),
        engine=replica.engine,
        carried=carried,
        kept_rollouts=KeptRollouts(
            run.checkpoints, run.logs, carried, identity=run.identity, start_step=run.start_step
        ),
        report=report,
        tokenizer=tokenizer,
    )
