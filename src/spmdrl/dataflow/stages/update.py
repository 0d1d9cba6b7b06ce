"""The update state: the rows of a batch become optimizer steps.

UpdateStage -> engine.update(rows, PolicyLoss) -> per micro-batch PolicyLoss(scores, rows) -> algorithm.loss
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from spmdrl.dataflow.samples.samples import Samples
from spmdrl.dataflow.samples.schema import COPIES
from spmdrl.dataflow.stages.rows import ModelTokens, copies_of, mini_batch_of_rows, piece_places, token_rows
from spmdrl.dataflow.stages.update_report import PIECE, ShownRows, mismatch, piece_keys, record_lags
from spmdrl.engines.training.packed_rows import LossTerms, MicroBatch, Scores, TokenRows
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.engines.training.updater import UpdateResult
from spmdrl.nouns.batch import Batch, LossScope, TokenLoss, TokenTerms, WorkerState
from spmdrl.observability.metrics import Recorder

Agreement = Literal["measured", "checked", "used"]
"""Treatment of differences between the log-probs of generator and trainer.

measured: they are reported; checked: any is an error, and `old_logprobs` are computed only for rows with tokens of
earlier weights, the generator's standing in for the others; used: additionally, `old_logprobs` are never computed.
"""

OldLogprobs = Literal["column", "own", "unknown"]
"""Source of the trainer's log-probs under the step's first weights: a column, an update's own results, or none."""
OLD_LOGPROBS = "old_logprobs"
_MEASURED_COLUMNS = frozenset({"rollout_logprobs", "versions"})


class Learner(Protocol):
    """The part of an algorithm that this state calls."""

    @property
    def unit_size(self) -> int: ...
    def columns_for_loss(self, num_updates: int) -> frozenset[str]: ...
    def loss(self, terms: TokenTerms) -> TokenLoss: ...
    def token_weights(self, lengths_B: Tensor, scope: LossScope) -> Tensor: ...
    def needs_signal(self) -> bool: ...


LossHook = Callable[[Learner, TokenTerms, Tensor], None]


@dataclass(frozen=True)
class UpdatePlan:
    """Number of times and parts in which the rows of a batch are used."""

    epochs: int
    updates_per_epoch: int
    max_completion_length: int
    skip_zero_advantage: bool
    agreement: Agreement = "measured"
    first_step: int = 1
    """first step that changes the weights"""

    @property
    def num_updates(self) -> int:
        return self.epochs * self.updates_per_epoch


class UpdateStage:
    """State that trains on this rank's rows. Collective: every rank calls it once per step."""

    state = WorkerState.UPDATE

    def __init__(self, engine: TrainingEngine, plan: UpdatePlan, recorder: Recorder, shown: ShownRows):
        self.engine = engine
        self.plan = plan
        self.recorder = recorder
        self.shown = shown

    def __call__(self, samples: Samples, learner: Learner, hooks: Sequence[LossHook] = ()) -> None:
        """Train on the step's rows. Each of `hooks` is called with the learner and the loss of each micro-batch."""
        columns = update_columns(learner.columns_for_loss(self.plan.num_updates), self.plan.agreement)
        batch = samples.take(self.state)
        self.shown.take(batch)
        version = self.engine.update_count
        if self._is_first_of_copy:
            record_lags(self.recorder, ModelTokens.of(batch).pick(batch.values("versions")), version)
        numbers, size = samples.rows.to_train, samples.group_size
        is_trained = np.isin(numbers // size, samples.rows.groups_to_train)
        # A prompt that was left out has no advantages to look at.
        self.shown.begin_step(np.concatenate([numbers[is_trained], numbers[~is_trained]]), size)
        if samples.step < self.plan.first_step:
            samples.commit(self.state)
            return
        rows, places_B = self._rows_for(learner, columns, batch), piece_places(batch)
        copies_B = copies_of(batch)[places_B]
        part_B = mini_batch_of_rows(batch.rows[places_B], samples.rows, self.plan.updates_per_epoch)
        for epoch in range(self.plan.epochs):
            for part in range(self.plan.updates_per_epoch):
                members = (part_B == part).nonzero().squeeze(1)
                old = self._trainers_old(columns, is_first=epoch == part == 0)
                loss = PolicyLoss(learner, version, old, self.shown if epoch == 0 else None, hooks)
                result = self._one_update(rows.select(members), copies_B[members], loss)
                if result is not None and self.plan.agreement != "measured":
                    check_agreement(result.maxima.get("mismatch/abs_max", 0.0), samples.step)
        self.shown.gather()
        samples.commit(self.state)

    def _rows_for(self, learner: Learner, columns: frozenset[str], batch: Batch) -> TokenRows:
        """Return all pieces with the loss's columns, except the weights, which depend on an update's rows."""
        rows = token_rows(batch, self.engine.config, [*sorted(columns), COPIES], unit_size=learner.unit_size)
        more = {PIECE: piece_keys(batch.rows[piece_places(batch)]).repeat_interleave(rows.response_offsets.diff())}
        if OLD_LOGPROBS in learner.columns_for_loss(self.plan.num_updates) - columns:
            more[OLD_LOGPROBS] = rows.response["rollout_logprobs"]
        return replace(rows, response=rows.response | more)

    def _one_update(self, rows: TokenRows, copies_B: Tensor, loss: PolicyLoss) -> UpdateResult | None:
        """Make one optimizer step, unless every row of this part was dropped, on all ranks alike."""
        learner, lengths_B = loss.learner, rows.response_offsets.diff()
        has_signal_B = rows_with_signal(rows.response["advantages"], lengths_B)
        counts = [int((lengths_B * copies_B).sum()), int(copies_B.sum()), int(copies_B[has_signal_B].sum())]
        num_tokens, num_rows, num_with_signal = self.engine.sum_over_rows(counts)
        if num_rows == 0:
            self._count(skipped=True, without_rows=True)
            return None
        self.recorder.mean("frac_advantage_zero", 1.0 - num_with_signal / num_rows, num_rows)
        # The weights count all rows, including those excluded below: the gradient stays the same.
        scope = LossScope(num_tokens, num_rows, self.plan.max_completion_length)
        weights_R = learner.token_weights(lengths_B, scope) * copies_B.repeat_interleave(lengths_B)
        rows = replace(rows, response=rows.response | {"weights": weights_R.float()})
        # Even without any signal the optimizer makes its step, because of its momentum.
        if self.plan.skip_zero_advantage and learner.needs_signal() and num_with_signal > 0:
            rows = rows.select(has_signal_B.nonzero().squeeze(1))
        self.recorder.total("update/rows", len(rows) if self._is_first_of_copy else 0)
        result = self.engine.update(rows, loss)
        self._report(result)
        return result

    def _trainers_old(self, columns: Iterable[str], *, is_first: bool) -> OldLogprobs:
        in_column = OLD_LOGPROBS in columns
        # If generation's stand in, a column would compare them with themselves.
        if is_first and not (in_column and self.plan.agreement == "measured"):
            return "own"
        return "column" if in_column else "unknown"

    @property
    def _is_first_of_copy(self) -> bool:
        """True if this rank is the one that counts rows which several ranks work on."""
        return self.engine.mesh.model.rank == 0

    def _report(self, result: UpdateResult) -> None:
        """Record results, equal on every rank; a metric is omitted when no token contributed."""
        self.recorder.mean("loss", result.loss)
        self.recorder.mean("grad_norm", result.grad_norm)
        self.recorder.mean("lr", result.lr)
        self._count(skipped=result.skipped)
        for name, (total, count) in result.metrics.items():
            if count:
                self.recorder.mean(name, total / count)
        for name, largest in result.maxima.items():
            if largest != -math.inf:
                self.recorder.maximum(name, largest)

    def _count(self, *, skipped: bool, without_rows: bool = False) -> None:
        """Count one update, on every rank."""
        self.recorder.alike("update/count", 1)
        self.recorder.alike("update/skipped", skipped)
        self.recorder.alike("update/without_rows", without_rows)


def rows_with_signal(advantages_R: Tensor, lengths_B: Tensor) -> Tensor:
    """Return True for rows [B] with a nonzero advantage at some token; one that isn't finite counts."""
    row_R = torch.arange(len(lengths_B)).repeat_interleave(lengths_B)
    strength_B = torch.zeros(len(lengths_B)).index_add_(0, row_R, advantages_R.abs())
    # Comparisons with NaN are false, but it must reach the loss, so that the update is skipped.
    return strength_B != 0


def update_columns(columns_for_loss: Iterable[str], agreement: Agreement) -> frozenset[str]:
    """Return the update's columns: those of the loss, and those that compare generator and trainer."""
    columns = frozenset(columns_for_loss) | _MEASURED_COLUMNS
    return columns - {OLD_LOGPROBS} if agreement == "used" else columns


def check_agreement(largest: float, step: int) -> None:
    """Raise RuntimeError if a log-prob of the generator differs from the trainer's."""
    if largest > 0:
        raise RuntimeError(
            f"debug.batch_invariant: in step {step} a log-prob of the generator differs by {largest:.3g} from the "
            "trainer's; they run other arithmetic or hold other weights; set debug.batch_invariant to false to continue"
        )


@dataclass(frozen=True)
class PolicyLoss:
    """The engine's loss per micro-batch: the algorithm's token losses, weighted, and their metrics."""

    learner: Learner
    version: int
    """policy version at the start of the step"""
    old: OldLogprobs
    shown: ShownRows | None
    """receives the results of some rows"""
    hooks: Sequence[LossHook] = ()

    def __call__(self, scores: Scores, micro: MicroBatch) -> LossTerms:
        columns = micro.response
        terms = TokenTerms(
            scores.logprobs_R, scores.entropy_R, columns, micro.row_of_response_R, micro.num_rows, scores.others_RJ
        )
        token_loss = self.learner.loss(terms)
        copies_R = columns.get(COPIES)
        metrics = {name: _sum_and_count(values.detach(), copies_R) for name, values in token_loss.metrics.items()}
        weighted_R = token_loss.loss_R * columns["weights"]
        weighted = weighted_R.sum()
        for hook in self.hooks:
            hook(self.learner, terms, weighted_R)
        if self.old == "unknown":
            return LossTerms(weighted, metrics)
        old_R = columns[OLD_LOGPROBS] if self.old == "column" else scores.logprobs_R.detach()
        if self.shown is not None:
            self.shown.add(columns[PIECE], old_R, weighted_R.detach())
        means, maxima = mismatch(old_R, columns, self.version)
        return LossTerms(weighted, metrics | means, maxima)


def _sum_and_count(values: Tensor, copies_R: Tensor | None) -> tuple[Tensor, Tensor]:
    if copies_R is None:
        return values.sum(), torch.tensor(float(values.numel()))
    return (values * copies_R).sum(), copies_R.sum()
