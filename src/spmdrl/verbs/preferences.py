"""The verbs that train on the pairs of `data.train`: `preferences` a policy (DPO), `reward-model` a model of scores."""

from __future__ import annotations

from spmdrl.config.config import Config
from spmdrl.config.reader import LoadedConfig, start_up
from spmdrl.engines.training.training_engine import UpdateResult
from spmdrl.job.model.role_models import RoleModels, build_role_models, saved_state
from spmdrl.job.model.shared_limit import share_limit
from spmdrl.job.preferences.held_out_pairs import HeldOutPairs
from spmdrl.job.preferences.objectives import PairObjective, PreferenceObjective, RewardObjective
from spmdrl.job.rollouts.skipped_batches import keep_skipped_batches
from spmdrl.job.run.run import Run
from spmdrl.job.run.run_folder import hold_folder_of_training
from spmdrl.job.start.banner import print_banner
from spmdrl.job.start.prepared import Prepared, prepare_together
from spmdrl.job.start.rank_facts import open_job
from spmdrl.job.start.start_checks import CheckedRun, check_run
from spmdrl.job.supervised_steps import take_steps
from spmdrl.nouns.roles import POLICY, REFERENCE
from spmdrl.resources.world import World


def main(loaded: LoadedConfig[Config]) -> int:
    """Train a policy on pairs, judging the held-out ones of `data.eval` before, during and after."""
    return _run(check_run(loaded, verb="preferences"))


def main_of_reward_model(loaded: LoadedConfig[Config]) -> int:
    """As `main`, a model of scores."""
    return _run(check_run(loaded, verb="reward-model"))


def _run(checked: CheckedRun) -> int:
    config = checked.config
    with open_job(checked) as world, hold_folder_of_training(config.run, world, resume=config.resume):
        _train(checked, world)
    return 0


def _train(checked: CheckedRun, world: World) -> None:
    run = Run(checked, world)
    with run.recording_failure():
        with start_up():
            prepared = prepare_together(checked, world, run.console)
            run.admit(prepared.sources)
            print_banner(checked, prepared, world, run.console)
            with run.console.doing("loading the weights"):
                models = build_role_models(checked, prepared.sources, world)
            run.resume(saved_state(checked.config.checkpoint, models))
            keep_skipped_batches(models, run)
            share_limit(models, run)
        objective = _objective(checked, prepared, models)
        pairs = list(prepared.held_out.all()) if prepared.held_out else []
        held_out = HeldOutPairs(pairs, objective, run, checked.config.eval)
        _loop(checked, run, prepared, objective, held_out)
        run.finish(**held_out.summary())


def _objective(checked: CheckedRun, prepared: Prepared, models: RoleModels) -> PairObjective:
    config, trainer = checked.config, models[POLICY].trainer
    if checked.verb == "reward-model":
        return RewardObjective(config.reward_model, prepared.renderer, trainer)
    reference = None
    if not config.preferences.reference_free:
        # Beside adapters there is no second model.
        reference = models[REFERENCE].trainer if REFERENCE in models else trainer
    return PreferenceObjective(config.preferences, prepared.renderer, trainer, reference)


def _loop(checked: CheckedRun, run: Run, prepared: Prepared, objective: PairObjective, held_out: HeldOutPairs) -> None:
    data, rows_per_step = objective.trainer.mesh.data, checked.rows_per_step

    def update(step: int) -> UpdateResult:
        chosen = prepared.prompts.take(step - 1, rows_per_step)[data.rank :: data.size]
        return objective.trainer.update(objective.rows(chosen), objective.loss(rows_per_step))

    take_steps(run, update, held_out)
