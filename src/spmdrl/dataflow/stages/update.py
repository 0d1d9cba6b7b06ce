"""The update state: the rows of a batch become optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from spmdrl.dataflow.samples.dock import Samples
from spmdrl.dataflow.stages.rows import replayed_columns, token_rows
from spmdrl.engines.training.engine import TrainingEngine, UpdateResult
from spmdrl.engines.training.rows import LossTerms, MicroBatch, Scores
from spmdrl.observability.metrics import Recorder
from spmdrl.types import Batch, LossScope, TokenLoss, TokenTerms, WorkerState


class Learner(Protocol):
    """The part of an algorithm that this state calls."""

    def columns_for_loss(self, num_updates: int) -> frozenset[str]: ...
    def loss(self, terms: TokenTerms) -> TokenLoss: ...
    def token_weights(self, lengths_B: Tensor, scope: LossScope) -> Tensor: ...
    def needs_signal(self) -> bool: ...


@dataclass(frozen=True)
class UpdatePlan:
    """How often and in how many parts the rows of a batch are used."""

    epochs: int
    updates_per_epoch: int
    max_completion_length: int
    skip_zero_advantage: bool

    @property
    def num_updates(self) -> int:
        return self.epochs * self.updates_per_epoch


class UpdateStage:
    """Trains on the rows this rank took. Collective: every rank calls it once a step."""

    state = WorkerState.UPDATE

    def __init__(self, engine: TrainingEngine, plan: UpdatePlan, recorder: Recorder):
        self.engine = engine
        self.plan = plan
        self.recorder = recorder

    def __call__(self, samples: Samples, learner: Learner) -> None:
        columns = sorted(learner.columns_for_loss(self.plan.num_updates))
        replayed = replayed_columns(self.engine.training.routing)
        batch = samples.take(self.state, {"prompt_ids", "response_ids", *columns, *replayed})
        # A mini-batch is a range of prompts, so it holds the same rows on any number of ranks.
        num_groups = samples.num_rows // samples.group_size
        part_B = batch.rows // samples.group_size * self.plan.updates_per_epoch // num_groups
        for _ in range(self.plan.epochs):
            for part in range(self.plan.updates_per_epoch):
                chosen = batch.select((part_B == part).nonzero().squeeze(1))
                self._one_update(chosen, columns, learner)
        samples.commit(self.state)

    def _one_update(self, batch: Batch, columns: list[str], learner: Learner) -> None:
        lengths_B = batch.lengths("response_ids")
        has_signal_B = rows_with_signal(batch)
        counts = [int(lengths_B.sum()), len(batch), int(has_signal_B.sum())]
        num_tokens, num_rows, num_with_signal = self.engine.sum_over_rows(counts)
        if num_rows == 0:
            # Every row of this part was dropped, on all ranks alike.
            self.recorder.maximum("update/skipped", 1.0)
            return
        # The weights count all rows, those that are left out below too: the gradient stays the same.
        scope = LossScope(num_tokens, num_rows, self.plan.max_completion_length)
        batch.put_ragged("weights", learner.token_weights(lengths_B, scope), batch.offsets("response_ids"))
        # Where no row has a signal the optimizer still makes its step, as momentum asks for one.
        if self.plan.skip_zero_advantage and learner.needs_signal() and num_with_signal > 0:
            batch = batch.select(has_signal_B.nonzero().squeeze(1))
        self.recorder.total("update/rows", len(batch) if self.engine.mesh.model.rank == 0 else 0)
        rows = token_rows(batch, self.engine.config, [*columns, "weights"])
        self._report(self.engine.update(rows, loss_of(learner)))

    def _report(self, result: UpdateResult) -> None:
        """Numbers that every rank holds alike."""
        self.recorder.mean("loss", result.loss)
        self.recorder.mean("grad_norm", result.grad_norm)
        self.recorder.mean("lr", result.lr)
        self.recorder.maximum("update/skipped", float(result.skipped))
        for name, (total, count) in result.metrics.items():
            self.recorder.mean(name, total / max(count, 1.0))


def rows_with_signal(batch: Batch) -> Tensor:
    """Which rows [B] have an advantage other than 0 at some token."""
    row_R = torch.arange(len(batch)).repeat_interleave(batch.lengths("advantages"))
    strength_B = torch.zeros(len(batch)).index_add_(0, row_R, batch.values("advantages").abs())
    return strength_B > 0


def loss_of(learner: Learner):
    """The engine's loss function: the learner's token losses, weighted, with what is reported of them."""

    def loss(scores: Scores, micro: MicroBatch) -> LossTerms:
        terms = TokenTerms(scores.logprobs_R, scores.entropy_R, micro.response, micro.row_of_response_R, micro.num_rows)
        token_loss = learner.loss(terms)
        reported = {**token_loss.metrics, **mismatch(scores.logprobs_R.detach(), micro.response["rollout_logprobs"])}
        count = torch.tensor(float(scores.logprobs_R.numel()))
        metrics = {name: (values_R.detach().sum(), count) for name, values_R in reported.items()}
        return LossTerms((token_loss.loss_R * micro.response["weights"]).sum(), metrics)

    return loss


def mismatch(logprobs_R: Tensor, rollout_logprobs_R: Tensor) -> dict[str, Tensor]:
    """How far the generator's log-probs lie from the trainer's, a token."""
    difference_R = rollout_logprobs_R - logprobs_R
    return {"mismatch/kl": difference_R, "mismatch/abs_mean": difference_R.abs()}
