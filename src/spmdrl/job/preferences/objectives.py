"""What a model learns from pairs: to prefer a response, or to score it higher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from spmdrl.algorithms.settings.preference_configs import PreferenceConfig
from spmdrl.algorithms.terms.pairs import PAIR, PairLoss, PairTokens, preference_loss, reward_loss
from spmdrl.config.config import RewardModelConfig
from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.engines.models.renderer import Renderer
from spmdrl.engines.training.batching.packed_rows import LossFunction, LossTerms, MicroBatch, Scores, TokenRows
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.job.preferences.pair_data import SIGN, pair_rows
from spmdrl.resources.device import to_device, to_host

_REFERENCE, _MARGIN = "ref_logprobs", "margin"


class PairObjective(Protocol):
    """A model in training, and what it minimises. The calls are collective over its mesh."""

    trainer: TrainingEngine

    def rows(self, prompts: Sequence[Prompt]) -> TokenRows:
        """The pairs of some rows as the model takes them, with all that the loss reads."""
        ...

    def loss(self, num_pairs: int) -> LossFunction:
        """The mean over the pairs of an optimizer step, of which there are `num_pairs` on all ranks."""
        ...

    def judge(self, rows: TokenRows) -> PairLoss:
        """The loss of each of these pairs, without a gradient, on the device."""
        ...


@dataclass(frozen=True)
class PreferenceObjective:
    """DPO, and what differs from it by its settings."""

    config: PreferenceConfig
    renderer: Renderer
    trainer: TrainingEngine
    reference: TrainingEngine | None
    """the trainer itself where it has adapters, without which it is its reference"""

    def rows(self, prompts: Sequence[Prompt]) -> TokenRows:
        rows = pair_rows(prompts, self.renderer)
        if self.reference is None:
            return rows
        with self.reference.without_adapters():
            (reference_R,) = to_host([self.reference.score(rows).logprobs_R])
        return replace(rows, response=rows.response | {_REFERENCE: reference_R})

    def loss(self, num_pairs: int) -> LossFunction:
        def of_micro(scores: Scores, micro: MicroBatch) -> LossTerms:
            tokens = _tokens(scores.logprobs_R, micro.response, micro.row_of_response_R, micro.num_rows)
            count = torch.tensor(float(scores.entropy_R.numel()))
            terms = _mean(preference_loss(tokens, self.config), num_pairs, micro)
            return replace(terms, metrics=terms.metrics | {"entropy": (scores.entropy_R.detach().sum(), count)})

        return of_micro

    def judge(self, rows: TokenRows) -> PairLoss:
        logprobs_R = self.trainer.score(rows).logprobs_R
        columns = {name: to_device(values_R, logprobs_R.device) for name, values_R in rows.response.items()}
        row_R = torch.arange(len(rows)).repeat_interleave(rows.response_offsets.diff())
        return preference_loss(
            _tokens(logprobs_R, columns, to_device(row_R, logprobs_R.device), len(rows)), self.config
        )


def _tokens(logprobs_R: Tensor, columns: dict[str, Tensor], row_R: Tensor, num_rows: int) -> PairTokens:
    return PairTokens(logprobs_R, columns.get(_REFERENCE), columns[SIGN], row_R, num_rows)


@dataclass(frozen=True)
class RewardObjective:
    """Bradley and Terry's model: the better response of a pair is to score higher."""

    config: RewardModelConfig
    renderer: Renderer
    trainer: TrainingEngine

    def rows(self, prompts: Sequence[Prompt]) -> TokenRows:
        rows, key = pair_rows(prompts, self.renderer), self.config.margin_key
        if key is None:
            return rows
        margins_B = torch.tensor([float(prompt.columns[key]) for prompt in prompts]).repeat_interleave(PAIR)
        margins_R = margins_B.repeat_interleave(rows.response_offsets.diff())
        return replace(rows, response=rows.response | {_MARGIN: margins_R})

    def loss(self, num_pairs: int) -> LossFunction:
        def of_micro(scores_B: Tensor, micro: MicroBatch) -> LossTerms:
            margins = None
            if _MARGIN in micro.response:
                # All tokens of a row have its margin.
                margins_B = scores_B.new_zeros(micro.num_rows)
                margins_B = margins_B.index_put((micro.row_of_response_R,), micro.response[_MARGIN])
                margins = margins_B.view(-1, PAIR)[:, 0]
            return _mean(reward_loss(scores_B, margins, self.config.centring), num_pairs, micro)

        return of_micro

    def judge(self, rows: TokenRows) -> PairLoss:
        scores_B = self.trainer.values(rows)
        margins = None
        if _MARGIN in rows.response:
            margins = to_device(rows.response[_MARGIN][rows.response_offsets[:-1:PAIR]], scores_B.device)
        return reward_loss(scores_B, margins, self.config.centring)


def _mean(found: PairLoss, num_pairs: int, micro: MicroBatch) -> LossTerms:
    """A micro-batch's share of the mean over all pairs, and the means to report."""
    count = torch.tensor(float(len(found.losses)))
    metrics: dict[str, Any] = {name: (values.sum(), count) for name, values in found.metrics.items()}
    metrics["tokens"] = torch.tensor(float(micro.num_tokens)), count
    return LossTerms(found.losses.sum() / num_pairs, metrics)
