"""Objectives of training on rows of data: answers, preferences between two responses, or scores of both."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmdrl.algorithms.settings.preference_configs import PreferenceConfig
from spmdrl.algorithms.terms.pairs import PAIR, PairLoss, PairTokens, preference_loss, reward_loss
from spmdrl.config.config import RewardModelConfig, SftConfig
from spmdrl.dataflow.data.prompts import LearntRows, Prompt
from spmdrl.engines.models.renderer import MarkedTokens, Renderer
from spmdrl.engines.training.checkpoints.file_writes import FileWrites, add_text
from spmdrl.engines.training.packed_rows import LossFunction, LossTerms, MicroBatch, Scores, TokenRows
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.engines.training.updater import UpdateResult
from spmdrl.job.model.role_models import RoleModels
from spmdrl.job.run.savable import Savable
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.job.start.prepared import Prepared
from spmdrl.nouns.batch import offsets_of
from spmdrl.nouns.roles import POLICY, REFERENCE
from spmdrl.observability.metrics import Recorder
from spmdrl.resources.device import to_device, to_host

# Steps over which the probability of an answer is averaged before it can end the training.
STEPS_OF_AVERAGE = 4
WATCH_FILE = "answer_probabilities.json"
_SIGN, _REFERENCE, _MARGIN = "sign", "ref_logprobs", "margin"


class Objective(ABC):
    """A model in training on rows of data. The calls are collective over its mesh."""

    trainer: TrainingEngine
    saved: tuple[Savable, ...] = ()
    """state of the objective, in checkpoints beside the model's"""

    @abstractmethod
    def batch(self, prompts: Sequence[Prompt], num_rows: int) -> tuple[TokenRows, LossFunction]:
        """Return this rank's rows of a step of `num_rows`, and the loss, their share of the mean over all."""

    def is_reached(self, result: UpdateResult) -> bool:
        """Return True if this update, the same on all ranks, must be the last one."""
        return False


def build_objective(checked: CheckedRun, prepared: Prepared, models: RoleModels, *, is_main: bool) -> Objective:
    """Return the objective of the run's verb."""
    config, renderer, trainer = checked.config, prepared.renderer, models[POLICY].trainer
    if checked.verb == "sft":
        return AnswerObjective(trainer, renderer, config.sft, is_main=is_main)
    if checked.verb == "reward-model":
        return ScoreObjective(trainer, renderer, config.reward_model)
    # With adapters there is no second model.
    reference = None if config.preferences.reference_free else models.get(REFERENCE, models[POLICY]).trainer
    return PreferenceObjective(trainer, renderer, config.preferences, reference)


class AnswerObjective(Objective):
    """Supervised training: the token mean of the answers' negative log-likelihood over all ranks."""

    def __init__(self, trainer: TrainingEngine, renderer: Renderer, config: SftConfig, *, is_main: bool):
        self.trainer = trainer
        self._learnt = LearntRows(renderer, config.turns)
        self._watch = AnswerWatch(config.stop_at_probability, is_main=is_main)
        self.saved = (self._watch,)

    def batch(self, prompts: Sequence[Prompt], num_rows: int) -> tuple[TokenRows, LossFunction]:
        rows = _packed([row for prompt in prompts for row in self._learnt.of(prompt)])
        (num_tokens,) = self.trainer.sum_over_rows([rows.num_response_tokens])
        return rows, lambda scores, micro: _token_mean_loss(scores, micro, num_tokens)

    def is_reached(self, result: UpdateResult) -> bool:
        # The expected reward of sampled exact answers.
        total, count = result.metrics["answer_probability"]
        return self._watch.is_enough(total / max(count, 1.0))


class AnswerWatch:
    """Decision when the answers are probable enough; its average is part of the run's state."""

    def __init__(self, goal: float | None, *, is_main: bool):
        self.recent: tuple[float, ...] = ()
        self._goal = goal
        self._is_main = is_main

    def is_enough(self, probability: float) -> bool:
        """Return True if the mean over the last `STEPS_OF_AVERAGE` steps, this one included, reaches the goal."""
        self.recent = (*self.recent, probability)[-STEPS_OF_AVERAGE:]
        return self._goal is not None and sum(self.recent) / STEPS_OF_AVERAGE >= self._goal

    def write_to(self, folder: Path, writes: FileWrites) -> None:
        """Write the last steps' probabilities, if there is a goal."""
        if self._goal is not None and self._is_main:
            add_text(writes, folder / WATCH_FILE, json.dumps(self.recent) + "\n")

    def read_from(self, folder: Path) -> None:
        """Restore the last steps' probabilities; none if the checkpoint has none."""
        path = folder / WATCH_FILE
        self.recent = tuple(map(float, json.loads(path.read_text()))) if path.is_file() else ()


def _packed(rows: Sequence[MarkedTokens]) -> TokenRows:
    """Pack rows, without attention across rows and with positions from 0 in each."""
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


def _token_mean_loss(scores: Scores, micro: MicroBatch, num_tokens: int) -> LossTerms:
    """Return the negative log-likelihood, this micro-batch's share of the mean over `num_tokens` tokens."""
    logprobs_R = scores.logprobs_R.detach()
    row_sums_B = logprobs_R.new_zeros(micro.num_rows).index_add_(0, micro.row_of_response_R, logprobs_R)
    num_rows, num_here = torch.tensor(float(micro.num_rows)), torch.tensor(float(logprobs_R.numel()))
    metrics = {
        "answer_probability": (row_sums_B.exp().sum(), num_rows),
        "entropy": (scores.entropy_R.detach().sum(), num_here),
        "tokens": (torch.tensor(float(micro.num_tokens)), num_rows),
    }
    return LossTerms(-scores.logprobs_R.sum() / max(num_tokens, 1), metrics)


@dataclass(frozen=True)
class PairObjective(Objective):
    """Training on pairs of responses."""

    trainer: TrainingEngine
    renderer: Renderer

    def batch(self, prompts: Sequence[Prompt], num_rows: int) -> tuple[TokenRows, LossFunction]:
        def loss(scored: Any, micro: MicroBatch) -> LossTerms:
            found = self._losses(scored, micro.response, micro.row_of_response_R, micro.num_rows)
            count = torch.tensor(float(len(found.losses)))
            metrics: dict[str, Any] = {name: (values.sum(), count) for name, values in found.metrics.items()}
            metrics["tokens"] = torch.tensor(float(micro.num_tokens)), count
            if isinstance(scored, Scores):
                entropy_R = scored.entropy_R.detach()
                metrics["entropy"] = entropy_R.sum(), torch.tensor(float(entropy_R.numel()))
            return LossTerms(found.losses.sum() / num_rows, metrics)

        return self.rows(prompts), loss

    def judge(self, rows: TokenRows) -> PairLoss:
        """Return the loss of each of these pairs, without a gradient, on the device."""
        scored, device = self._scored(rows), self.trainer.device.torch_device
        columns = {name: to_device(values_R, device) for name, values_R in rows.response.items()}
        row_R = torch.arange(len(rows)).repeat_interleave(rows.response_offsets.diff())
        return self._losses(scored, columns, to_device(row_R, device), len(rows))

    def rows(self, prompts: Sequence[Prompt]) -> TokenRows:
        """Return the pairs of some rows for the model, with the loss's columns."""
        return pair_rows(prompts, self.renderer)

    @abstractmethod
    def _scored(self, rows: TokenRows) -> Any:
        """Return scores of rows in the loss's form."""

    @abstractmethod
    def _losses(self, scored: Any, columns: Mapping[str, Tensor], row_R: Tensor, num_rows: int) -> PairLoss:
        """Return the loss of each pair of rows; `columns`, and the row, are given per response token."""


@dataclass(frozen=True)
class PreferenceObjective(PairObjective):
    """DPO and its variants by settings."""

    config: PreferenceConfig
    reference: TrainingEngine | None
    """the trainer itself if it has adapters, without which it is its reference"""

    def rows(self, prompts: Sequence[Prompt]) -> TokenRows:
        rows = super().rows(prompts)
        if self.reference is None:
            return rows
        with self.reference.without_adapters():
            (reference_R,) = to_host([self.reference.score(rows).logprobs_R])
        return replace(rows, response=rows.response | {_REFERENCE: reference_R})

    def _scored(self, rows: TokenRows) -> Scores:
        return self.trainer.score(rows)

    def _losses(self, scored: Scores, columns: Mapping[str, Tensor], row_R: Tensor, num_rows: int) -> PairLoss:
        tokens = PairTokens(scored.logprobs_R, columns.get(_REFERENCE), columns[_SIGN], row_R, num_rows)
        return preference_loss(tokens, self.config)


@dataclass(frozen=True)
class ScoreObjective(PairObjective):
    """Bradley-Terry model: the better response of a pair gets the higher score."""

    config: RewardModelConfig

    def rows(self, prompts: Sequence[Prompt]) -> TokenRows:
        rows, key = super().rows(prompts), self.config.margin_key
        if key is None:
            return rows
        margins_B = torch.tensor([float(prompt.columns[key]) for prompt in prompts]).repeat_interleave(PAIR)
        margins_R = margins_B.repeat_interleave(rows.response_offsets.diff())
        return replace(rows, response=rows.response | {_MARGIN: margins_R})

    def _scored(self, rows: TokenRows) -> Tensor:
        return self.trainer.values(rows)

    def _losses(self, scored: Tensor, columns: Mapping[str, Tensor], row_R: Tensor, num_rows: int) -> PairLoss:
        margins = None
        if _MARGIN in columns:
            # All tokens of a row have its margin.
            margins_B = scored.new_zeros(num_rows).index_put((row_R,), columns[_MARGIN])
            margins = margins_B.view(-1, PAIR)[:, 0]
        return reward_loss(scored, margins, self.config.centring)


def pair_rows(prompts: Sequence[Prompt], renderer: Renderer) -> TokenRows:
    """Return each prompt with its preferred response, then with the other one; both include the end of turn."""
    learnt = LearntRows(renderer)
    rows = _packed([row for prompt in prompts for row in learnt.of(prompt)])
    # 1 at tokens of preferred responses, -1 at tokens of the others.
    signs_R = torch.tensor([1.0, -1.0] * len(prompts)).repeat_interleave(rows.response_offsets.diff())
    return replace(rows, response={_SIGN: signs_R}, unit_size=PAIR)


def record_update(recorder: Recorder, result: UpdateResult, *, num_ranks: int) -> None:
    """Record results that are equal on every rank."""
    recorder.mean("loss", result.loss)
    recorder.mean("grad_norm", result.grad_norm)
    recorder.mean("lr", result.lr)
    recorder.alike("update/count", 1)
    recorder.alike("update/skipped", result.skipped)
    metrics = dict(result.metrics)
    recorder.total("perf/tokens", metrics.pop("tokens")[0] / num_ranks)
    for name, (total, count) in metrics.items():
        recorder.mean(name, total / max(count, 1.0))
