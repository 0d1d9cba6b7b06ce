"""A training run, built bottom-up: models, sample flow, rewards, worker states."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from spmdrl.dataflow.stages.stages import Stage, StageHook, Stages
from spmdrl.job.evaluator import build_evaluator
from spmdrl.job.held_out import AnswerJudge, HeldOut
from spmdrl.job.model.replica import Replica, build_policys_replica
from spmdrl.job.model.role_models import build_role_models, saved_state
from spmdrl.job.model.switching import Switching, build_switching
from spmdrl.job.model.update_troubles import watch_updates
from spmdrl.job.rollouts.ahead import AheadRollouts
from spmdrl.job.rollouts.rollout import build_rollout
from spmdrl.job.rollouts.samples_report import SamplesReport, build_report
from spmdrl.job.run.resuming import admit
from spmdrl.job.run.run import Run
from spmdrl.job.run.savable import OfMembers
from spmdrl.job.sample_flow import SampleFlow
from spmdrl.job.start.banner import print_banner
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.job.start.prepared import Prepared, prepare_together
from spmdrl.job.worker_states import StepAlgorithm, judging_state, learning_states, scoring_states
from spmdrl.nouns.roles import WorkerState
from spmdrl.resources.rank_sets import form_sets


@dataclass(frozen=True)
class Training:
    """The parts that the loop calls."""

    run: Run
    algorithm: StepAlgorithm
    flow: SampleFlow
    switching: Switching
    stages: Stages
    held_out: HeldOut
    replica: Replica
    rollouts: AheadRollouts
    report: SamplesReport
    prepared: Prepared


def build(checked: CheckedRun, run: Run, stack: ExitStack) -> Training:
    """Build the layers bottom-up; resources are closed with the stack. Collective over all ranks."""
    world = run.world
    prepared = prepare_together(checked, world, run.console)
    checked = run.counted(len(prepared.prompts))
    config = checked.config
    admitted = admit(checked, prepared.sources, world, run.console)
    print_banner(checked, prepared, world, run.console)
    tokenizer, prompts = prepared.tokenizer, prepared.prompts
    sets = form_sets(config.resources.ranks, world)
    with run.console.doing("loading the weights"):
        models = build_role_models(checked, prepared.sources, world)
    with run.console.doing("starting the generation engine"):
        replica = build_policys_replica(checked, prepared.source, world, sets)
    flow = SampleFlow(checked, prompts, replica.mesh, world)
    rollouts = AheadRollouts(
        flow, sets, lag=config.rollout.lag, num_steps=checked.num_steps,
        swaps_in_flight=config.rollout.swap_in_flight > 0,
    )  # fmt: skip
    algorithm = StepAlgorithm(checked.algorithm, is_main=world.is_main)
    others = (flow.pending, algorithm, flow.history, flow.account, rollouts)
    run.resume(admitted, saved_state(config.checkpoint, models, *others, where=partial(OfMembers, sets.update)))
    if sets.update.is_member:
        with sets.update.alone():
            watch_updates(models, run)

    logs, rollout = run.logs, None
    if sets.generation.is_member:
        with sets.generation.alone():
            rollout = build_rollout(
                checked, run.logs, prepared, replica, stack, run.checkpoints.store.steps,
                is_first=sets.generation.is_first,
            )  # fmt: skip
    pool, turns = (rollout.pool, rollout.generation.turns) if rollout is not None else (None, None)
    evaluator = build_evaluator(config, prepared, replica, pool, turns)
    num_rows = max(flow.most_rows, evaluator.num_rows if evaluator else 0)
    switching = build_switching(
        config, logs, models, replica, prepared.source, stack, num_rows=num_rows, prompt_at=prompts.at, sets=sets
    )
    judging = judging_state(checked, prepared, logs, switching.ledger)
    flow.open_dock(checked, models, prepared.source.decoder, judging.judge.mesh if judging else None, sets, stack)
    report = build_report(checked, logs, models, flow.dock, tokenizer.decode, stack)
    hooks: list[StageHook] = [report]
    scores = scoring_states(checked, models, switching, prepared) if models else {}
    states: dict[WorkerState, Stage] = {**scores}
    attempts = None
    if rollout is not None:
        attempts = rollout.attempts(checked, flow.pending)
        states[WorkerState.GENERATION] = rollout.stage(
            checked, logs, flow.pending, [*scores.values()], swaps=switching.swaps
        )
        states[WorkerState.REWARD] = rollout.reward
    if judging:
        states[WorkerState.JUDGE] = judging
    if models:
        states |= learning_states(checked, models, logs, algorithm, report, hooks)
    stages = Stages(
        checked.slots, states, logs.timeline, switching.note_memory, hooks=hooks, sets=sets, attempts=attempts
    )
    rollouts.connect(stages, switching, logs, run.checkpoints, admitted.identity, states.get(WorkerState.GENERATION))
    return Training(
        run=run,
        algorithm=algorithm,
        flow=flow,
        switching=switching,
        stages=stages,
        held_out=HeldOut(AnswerJudge(evaluator, switching, run) if evaluator else None, run, config.eval),
        replica=replica,
        rollouts=rollouts,
        report=report,
        prepared=prepared,
    )
