"""START HERE: the `train` verb. Builds the four layers bottom-up, then runs the loop, in verbs only."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NoReturn

from spmdrl.config.config import Config, DebugConfig
from spmdrl.config.reader import ConfigError, LoadedConfig, start_up
from spmdrl.dataflow.stages.reward import RewardFailure
from spmdrl.dataflow.stages.schedule import Phase
from spmdrl.engines.models.kernels.ops import compute_batch_invariantly
from spmdrl.job.run.outcome import WARM_START
from spmdrl.job.run.run import Run
from spmdrl.job.run.run_failure import recording_failure
from spmdrl.job.start.prepared import prepare_without_weights
from spmdrl.job.start.rank_facts import open_job
from spmdrl.job.start.start_checks import check_run
from spmdrl.job.training import Training, build
from spmdrl.resources.world import make_deterministic
from spmdrl.runtime.launch import command_of
from spmdrl.runtime.supervision.stop_request import StopAgreed
from spmdrl.verbs.planned_beside import PlanBeside
from spmdrl.verbs.supervised import warm_started


def main(loaded: LoadedConfig[Config], *, plan_device: str | None = None) -> int:
    """Train with rewards; repeating the command resumes from the newest checkpoint.

    With `plan_device` another process plans the run for such devices meanwhile.
    """
    started = time.perf_counter()
    config, checked = loaded.value, check_run(loaded, verb="train")
    is_here = config.model.path is None or Path(config.model.path).expanduser().is_dir()
    if config.sft.trains and is_here and not (config.run.folder / WARM_START).exists():
        # Errors of the steps with rewards are raised before the supervised ones.
        prepare_without_weights(checked)
    set_kernels(config.debug)
    with open_job(checked, trains=True) as world, closing(PlanBeside(checked, world, plan_device)) as plan:
        checked = warm_started(checked, world)
        run = Run(checked, world, started=started)
        with recording_failure(run), ExitStack() as stack:
            plan.show_on(run.console)
            with start_up():
                training = build(checked, run, stack)
            plan.wait()
            try:
                loop(training)
            except RewardFailure as failure:
                raise ConfigError(str(failure)) from failure
            except StopAgreed as agreed:
                abandon_step(training, agreed.reason)
            run.finish(**training.held_out.summary())
            if balance := training.rollouts.balance():
                run.console.note(f"  sets       {balance}")
            answer = command_of("generate", f"model.path={run.folder}", "prompt='...'")
            run.console.note(f"  next       {answer}")
    return 0


def set_kernels(config: DebugConfig) -> None:
    """Compute deterministically, and every row as if it were alone, if the config asks for it."""
    if config.deterministic:
        make_deterministic()
    if config.batch_invariant:
        compute_batch_invariantly()


# One step. At each `|` all ranks commit: what one of them put is there for the states that read it.
#
#   rank       switch | generate           | reference    | old log-probs | reward       | credit     | update
#   waits for  slices | its engine         |              | weights       | its children | all rows   | all gradients
#   puts              | responses          | ref_logprobs | old_logprobs  | rewards      | advantages | nothing
#   children          | score each response as it ends . . . . . . . . . > |
#   meanwhile         | reference, old log-probs of whole groups, while rows wait for an environment
#   device     generation's weights, cache | update weights return > . . . . . . . . . . . . . . . . . . . . . .
#
# With `resources.ranks.generation`, some ranks only generate and reward, the others do all else;
# with `rollout.lag` both work side by side, on batches of different steps (job/rollouts/ahead.py).


def loop(training: Training) -> None:
    """Rollout, credit, update, until no step remains. Collective over all ranks."""
    run, switching, stages = training.run, training.switching, training.stages
    training.held_out.before()
    for step in run.remaining_steps():
        samples = training.rollouts.next(step)
        stages.run(Phase.WITHOUT_ACTOR, samples)
        switching.to_update(step)
        stages.run(Phase.WITH_ACTOR, samples)
        training.rollouts.keep(samples)
        stages.run(Phase.UPDATE, samples)
        training.algorithm.advance()
        training.report.count(training.rollouts.close(samples))
        training.held_out.when_due(step)
        run.finish_step(step)


def abandon_step(training: Training, reason: str) -> NoReturn:
    """Leave a step that has trained nothing yet, save the previous one, and raise Stopped. Collective over all ranks.

    The same command repeats the step, to the bit.
    """
    if training.replica.engine.num_unfinished:
        # Ranks may have agreed in the middle of generation, as they announced a portion.
        training.replica.engine.abort()
    training.flow.pending.undo_step()
    training.switching.to_update(training.run.present_step)
    training.run.stop(reason)
