"""The `sft` verb: supervised training on the answers of `data.train`, with the engine of reinforcement learning."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from spmdrl.config.config import Config
from spmdrl.config.reader import ConfigError, LoadedConfig, start_up
from spmdrl.dataflow.data.learnt_rows import LearntRows
from spmdrl.engines.models.renderer import MarkedTokens
from spmdrl.engines.reward.pool import RewardPool
from spmdrl.engines.training.batching.packed_rows import LossFunction, LossTerms, MicroBatch, Scores, TokenRows
from spmdrl.engines.training.checkpoints.file_writes import FileWrites, add_text
from spmdrl.engines.training.training_engine import TrainingEngine, UpdateResult
from spmdrl.job.evaluation.evaluator import build_evaluator
from spmdrl.job.evaluation.held_out import HeldOut
from spmdrl.job.model.model_source import prepare_model
from spmdrl.job.model.replica import build_policys_replica
from spmdrl.job.model.role_models import RoleModels, build_role_models, saved_state
from spmdrl.job.model.shared_limit import share_limit
from spmdrl.job.model.switching import build_switching
from spmdrl.job.rollouts.skipped_batches import keep_skipped_batches
from spmdrl.job.run.outcome import WARM_START, finished_model
from spmdrl.job.run.run import Run
from spmdrl.job.run.run_folder import hold_folder_of_training
from spmdrl.job.start.banner import print_banner
from spmdrl.job.start.prepared import Prepared, prepare_together
from spmdrl.job.start.rank_facts import open_job
from spmdrl.job.start.start_checks import CheckedRun, check_run
from spmdrl.job.supervised_steps import take_steps
from spmdrl.job.training_step import build_turns
from spmdrl.nouns.batch import offsets_of
from spmdrl.nouns.roles import POLICY
from spmdrl.observability.terminal.console import Console
from spmdrl.resources.world import World
from spmdrl.runtime.supervision.stop_request import request

# Steps over which the probability of an answer is averaged before it can end the training.
STEPS_OF_AVERAGE = 4
WATCH_FILE = "answer_probabilities.json"


def main(loaded: LoadedConfig[Config]) -> int:
    """Train on the answers of `data.train`, evaluating on `data.eval` before and after."""
    config, checked = loaded.value, check_run(loaded, verb="sft")
    with open_job(checked) as world, hold_folder_of_training(config.run, world, resume=config.resume):
        train_supervised(checked, world)
    return 0


def warm_started(checked: CheckedRun, world: World) -> CheckedRun:
    """With `sft.max_steps` > 0, train on answers first, in a run of its own below this one's folder. Collective."""
    config = checked.config
    if config.sft.max_steps == 0:
        return checked
    folder = config.run.folder / WARM_START
    inner = replace(
        config,
        run=replace(config.run, dir=str(folder)),
        # In float32, because the run goes on from these weights and not from the trainer's state.
        checkpoint=replace(config.checkpoint, interval=0, model_only=False, best=None, keep_best=None, dtype="float32"),
        resume="auto",
    )
    warm_start = replace(checked, config=inner, eval_rows=[], verb="sft")
    console = Console(enabled=world.is_main)
    model = finished_model(folder, world)
    if model is None:
        console.note(f"--- first sft: up to {config.sft.max_steps} supervised steps on the answers, a warm start ---")
        train_supervised(warm_start, world)
        request.begin_set_up()
        # FSDP2's parts refer to each other in cycles, which would keep these weights on the device beside the next.
        gc.collect()
        world.device.empty_cache()
        model = finished_model(folder, world)
    else:
        with start_up():
            # Refuses a folder whose supervised run, which has ended, was another one.
            Run(warm_start, world).admit({POLICY: prepare_model(inner, world)})
    if model is None:
        raise ConfigError(f"the warm start left no checkpoint in {folder}: the disk refused it; free some")
    console.note(f"--- now {config.algo.name}: {config.train.max_steps} steps with rewards, from {model} ---")
    return replace(checked, config=replace(config, model=replace(config.model, path=str(model), make=None)))


def train_supervised(checked: CheckedRun, world: World) -> None:
    """Run the supervised steps of a run, going on where they stopped. Collective."""
    run = Run(checked, world)
    with run.recording_failure(), ExitStack() as stack:
        with start_up():
            prepared = prepare_together(checked, world, run.console)
            run.admit(prepared.sources)
            print_banner(checked, prepared, world, run.console)
            with run.console.doing("loading the weights"):
                models = build_role_models(checked, prepared.sources, world)
            watch = AnswerWatch(checked.config.sft.stop_at_probability, is_main=world.is_main)
            run.resume(saved_state(checked.config.checkpoint, models, watch))
            keep_skipped_batches(models, run)
            share_limit(models, run)
            held_out = _build_held_out(checked, run, models, prepared, stack)
        batches = SupervisedBatches(checked.config, prepared, models[POLICY].trainer)
        _train(batches, run, watch, held_out)
        run.finish(**held_out.summary())


def _build_held_out(checked: CheckedRun, run: Run, models: RoleModels, prepared: Prepared, stack: ExitStack) -> HeldOut:
    """Evaluations of a policy that answers nothing else."""
    config = checked.config
    if prepared.held_out is None:
        return HeldOut(None, None, run, config.eval)
    replica = build_policys_replica(checked, prepared.source, run.world)
    pool = stack.enter_context(RewardPool(config.reward))
    turns = build_turns(config, replica, prepared, run.world, stack)
    evaluator = build_evaluator(config, prepared, replica, pool, turns)
    assert evaluator is not None, "there are held-out rows"
    prompts = evaluator.prompts
    switching = build_switching(
        config, run.logs, models, replica, stack,
        num_rows=evaluator.num_rows, prompt_at=lambda position: prompts[position % len(prompts)],
    )  # fmt: skip
    return HeldOut(evaluator, switching, run, config.eval)


def _train(batches: SupervisedBatches, run: Run, watch: AnswerWatch, held_out: HeldOut) -> None:
    def update(step: int) -> UpdateResult:
        result = batches.trainer.update(*batches.of_step(step))
        if watch.is_enough(answer_probability(result)):
            run.end_early()
        return result

    take_steps(run, update, held_out)


def answer_probability(result: UpdateResult) -> float:
    """The mean probability of a whole reference answer: the reward that sampled exact answers can expect."""
    total, count = result.metrics["answer_probability"]
    return total / max(count, 1.0)


class AnswerWatch:
    """Decides when the answers are probable enough; what it averages over is a part of the run's state."""

    def __init__(self, goal: float | None, *, is_main: bool):
        self.recent: tuple[float, ...] = ()
        self._goal = goal
        self._is_main = is_main

    def is_enough(self, probability: float) -> bool:
        """Whether the mean over the last `STEPS_OF_AVERAGE` steps, this one included, reaches the goal."""
        self.recent = (*self.recent, probability)[-STEPS_OF_AVERAGE:]
        return self._goal is not None and sum(self.recent) / STEPS_OF_AVERAGE >= self._goal

    def write_to(self, folder: Path, writes: FileWrites) -> None:
        """Write the last steps' probabilities, where they decide anything."""
        if self._goal is not None and self._is_main:
            add_text(writes, folder / WATCH_FILE, json.dumps(self.recent) + "\n")

    def read_from(self, folder: Path) -> None:
        """Take them back."""
        path = folder / WATCH_FILE
        self.recent = tuple(map(float, json.loads(path.read_text()))) if path.is_file() else ()


class SupervisedBatches:
    """The rows of each step, a pure function of its number."""

    def __init__(self, config: Config, prepared: Prepared, trainer: TrainingEngine):
        self.trainer = trainer
        self._config = config
        self._prompts = prepared.prompts
        self._learnt = LearntRows(prepared.renderer, config.sft.turns)

    def of_step(self, step: int) -> tuple[TokenRows, LossFunction]:
        """This rank's rows, and their loss, the token mean over all ranks' answers. Collective."""
        axis, num_rows = self.trainer.mesh.data, self._config.sft.rows_per_step
        prompts = self._prompts.take(step - 1, num_rows)[axis.rank :: axis.size]
        rows = rows_of([row for prompt in prompts for row in self._learnt.of(prompt)])
        (num_tokens,) = self.trainer.sum_over_rows([rows.num_response_tokens])
        return rows, lambda scores, micro: token_mean_loss(scores, micro, num_tokens)


def rows_of(rows: Sequence[MarkedTokens]) -> TokenRows:
    """Packed rows, in which no row attends another and positions begin anew."""
    is_learnt_T = torch.tensor([mark for row in rows for mark in row.is_learnt], dtype=torch.bool)
    first_B = [row.is_learnt.index(True) for row in rows]
    # One run at the end needs no marks.
    is_one_run = all(all(row.is_learnt[first:]) for row, first in zip(rows, first_B, strict=True))
    return TokenRows(
        tokens_T=torch.tensor([token for row in rows for token in row.ids], dtype=torch.int64),
        offsets=offsets_of([len(row.ids) for row in rows]),
        prompt_lengths_B=torch.tensor(first_B, dtype=torch.int64),
        is_model_T=None if is_one_run else is_learnt_T,
    )


def token_mean_loss(scores: Scores, micro: MicroBatch, num_tokens: int) -> LossTerms:
    """Negative log-likelihood, this micro-batch's share of the mean over `num_tokens` tokens."""
    logprobs_R = scores.logprobs_R.detach()
    row_sums_B = logprobs_R.new_zeros(micro.num_rows).index_add_(0, micro.row_of_response_R, logprobs_R)
    num_rows, num_here = torch.tensor(float(micro.num_rows)), torch.tensor(float(logprobs_R.numel()))
    metrics = {
        "answer_probability": (row_sums_B.exp().sum(), num_rows),
        "entropy": (scores.entropy_R.detach().sum(), num_here),
        "tokens": (torch.tensor(float(micro.num_tokens)), num_rows),
    }
    return LossTerms(-scores.logprobs_R.sum() / max(num_tokens, 1), metrics)
