"""The verbs that train on rows of data alone, in one loop: `sft`, `preferences` (DPO) and `reward-model`."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from dataclasses import replace

from spmdrl.config.config import Config
from spmdrl.config.reader import ConfigError, LoadedConfig, start_up
from spmdrl.job.held_out import build_held_out
from spmdrl.job.model.model_source import prepare_model
from spmdrl.job.model.role_models import build_role_models, saved_state
from spmdrl.job.model.update_troubles import watch_updates
from spmdrl.job.objectives import build_objective, record_update
from spmdrl.job.run.outcome import WARM_START, finished_model
from spmdrl.job.run.resuming import admit
from spmdrl.job.run.run import Run
from spmdrl.job.run.run_failure import recording_failure
from spmdrl.job.start.banner import print_banner
from spmdrl.job.start.checked_run import CheckedRun, Verb
from spmdrl.job.start.prepared import prepare_together
from spmdrl.job.start.rank_facts import open_job
from spmdrl.job.start.start_checks import check_run, over_all_ranks
from spmdrl.nouns.roles import POLICY
from spmdrl.observability.terminal.console import Console
from spmdrl.resources.world import World
from spmdrl.runtime.supervision.stop_request import request


def main(loaded: LoadedConfig[Config], verb: Verb) -> int:
    """Train on the rows of `data.train`, evaluating on `data.eval` before, during and after."""
    checked = check_run(loaded, verb=verb)
    with open_job(checked, trains=True) as world:
        train_supervised(checked, world)
    return 0


def warm_started(checked: CheckedRun, world: World) -> CheckedRun:
    """Train on answers first if `sft` has steps, in a run of its own below this one's folder. Collective."""
    config = checked.config
    if not config.sft.trains:
        return checked
    folder = config.run.folder / WARM_START
    inner = replace(
        config,
        run=replace(config.run, dir=str(folder)),
        # In float32, because the run continues from these weights and not from the trainer's state.
        checkpoint=replace(config.checkpoint, interval=0, model_only=False, best=None, keep_best=None, dtype="float32"),
        resume="auto",
    )
    with start_up():
        # Ranks that only generate afterwards take part too.
        warm_start = over_all_ranks(replace(checked, config=inner, eval_rows=[], verb="sft"), world.size)
    console = Console(enabled=world.is_main)
    model = finished_model(folder, world)
    if model is None:
        console.note(f"--- first sft: up to {warm_start.length} on the answers, a warm start ---")
        train_supervised(warm_start, world)
        request.begin_set_up()
        # FSDP2's parts refer to each other in cycles, which would keep these weights on the device beside the next.
        gc.collect()
        world.device.empty_cache()
        model = finished_model(folder, world)
    else:
        with start_up():
            # Refuses a folder whose finished supervised run was another one.
            admit(warm_start, {POLICY: prepare_model(inner, world)}, world, console)
    if model is None:
        raise ConfigError(f"the warm start left no checkpoint in {folder}: the disk refused it; free some")
    console.note(f"--- now {config.algo.name}: {checked.length} with rewards, from {model} ---")
    return replace(checked, config=replace(config, model=replace(config.model, path=str(model), make=None)))


def train_supervised(checked: CheckedRun, world: World) -> None:
    """Run the supervised steps of a run, resuming where they stopped. Collective."""
    run = Run(checked, world)
    with recording_failure(run), ExitStack() as stack:
        with start_up():
            prepared = prepare_together(checked, world, run.console)
            checked = run.counted(len(prepared.prompts))
            admitted = admit(checked, prepared.sources, world, run.console)
            print_banner(checked, prepared, world, run.console)
            with run.console.doing("loading the weights"):
                models = build_role_models(checked, prepared.sources, world)
            objective = build_objective(checked, prepared, models, is_main=world.is_main)
            run.resume(admitted, saved_state(checked.config.checkpoint, models, *objective.saved))
            watch_updates(models, run)
            held_out = build_held_out(checked, run, models, prepared, objective, stack)
        trainer, num_rows = objective.trainer, checked.rows_per_step
        held_out.before()
        for step in run.remaining_steps():
            with run.logs.timeline.stage("update", step):
                prompts = prepared.prompts.take(step - 1, num_rows)[trainer.mesh.data.rank :: trainer.mesh.data.size]
                result = trainer.update(*objective.batch(prompts, num_rows))
            if objective.is_reached(result):
                run.end_early()
            record_update(run.logs.recorder, result, num_ranks=world.size)
            held_out.when_due(step)
            run.finish_step(step)
        run.finish(**held_out.summary())
