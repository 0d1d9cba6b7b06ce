"""The critic's update: values of response tokens are drawn to their returns.

Shape letters: `R` packed response tokens that the model wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.dataflow.samples.samples import Samples
from spmdrl.dataflow.samples.schema import COPIES
from spmdrl.dataflow.stages.rows import copies_of, mini_batch_of_rows, token_rows
from spmdrl.dataflow.stages.update import UpdatePlan
from spmdrl.engines.training.packed_rows import LossTerms, MicroBatch, TokenRows
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.batch import WorkerState
from spmdrl.nouns.settings.role_configs import CriticConfig
from spmdrl.observability.metrics import Recorder


class CriticUpdateStage:
    """Trains the critic on the rows that the policy is trained on. Collective: every rank calls it once per step."""

    state = WorkerState.CRITIC_UPDATE

    def __init__(self, engine: TrainingEngine, config: CriticConfig, plan: UpdatePlan, recorder: Recorder):
        self.engine = engine
        self.config = config
        self.plan = plan
        self.recorder = recorder

    def __call__(self, samples: Samples) -> None:
        # Rows wait for their advantages, since those that get none are dropped; the critic itself needs none.
        batch = samples.take(self.state, samples.rows.reads(self.state) - {"advantages"})
        rows, copies_B = token_rows(batch, self.engine.config, ("values", "returns", COPIES)), copies_of(batch)
        self._report_fit(rows, copies_B)
        part_B = mini_batch_of_rows(batch.rows, samples.rows, self.plan.updates_per_epoch)
        for _ in range(self.plan.epochs):
            for part in range(self.plan.updates_per_epoch):
                members = (part_B == part).nonzero().squeeze(1)
                self._one_update(rows.select(members), copies_B[members])
        samples.commit(self.state)

    def _one_update(self, rows: TokenRows, copies_B: Tensor) -> None:
        """One optimizer step, unless every row of this part was dropped, on all ranks alike."""
        (num_tokens,) = self.engine.sum_over_rows([int((rows.response_offsets.diff() * copies_B).sum())])
        if num_tokens == 0:
            self.recorder.alike("critic/skipped", 1)
            return
        result = self.engine.update(rows, ValueLoss(num_tokens, self.config.clip))
        self.recorder.mean("critic/loss", result.loss)
        self.recorder.mean("critic/grad_norm", result.grad_norm)
        self.recorder.mean("critic/lr", result.lr)
        self.recorder.alike("critic/skipped", result.skipped)

    def _report_fit(self, rows: TokenRows, copies_B: Tensor) -> None:
        """How well the values before the update fit the returns. Collective over the data axes."""
        copies_R = copies_B.repeat_interleave(rows.response_offsets.diff())
        values_R, returns_R = (rows.response[name].repeat_interleave(copies_R) for name in ("values", "returns"))
        explained = explained_variance(values_R, returns_R, self.engine.mesh.data.sum)
        if explained is not None:
            self.recorder.mean("critic/explained_variance", explained)


@dataclass(frozen=True)
class ValueLoss:
    """0.5 * max((V - R)^2, (V_clipped - R)^2), a mean over all tokens of one optimizer step (PPO, arXiv:1707.06347).

    V_clipped is V, but within `clip` of the value before the update.
    """

    num_tokens: int
    """of the optimizer step, on all ranks together"""
    clip: float | None

    def __call__(self, values_R: Tensor, micro: MicroBatch) -> LossTerms:
        before_R, returns_R = micro.response["values"], micro.response["returns"]
        error_R = (values_R - returns_R) ** 2
        if self.clip is not None:
            clipped_R = before_R + (values_R - before_R).clamp(-self.clip, self.clip)
            error_R = torch.maximum(error_R, (clipped_R - returns_R) ** 2)
        if COPIES in micro.response:
            error_R = error_R * micro.response[COPIES]
        return LossTerms(0.5 * error_R.sum() / self.num_tokens, {})


def explained_variance(values_R: Tensor, returns_R: Tensor, over_ranks: Callable[[Tensor], Tensor]) -> float | None:
    """1 - Var(R - V) / Var(R) over the tokens of all ranks, in float64; None where all returns are the same.

    `over_ranks` adds up a tensor over the ranks that have other rows.
    """
    returns_R = returns_R.double()
    both_2R = torch.stack((returns_R, returns_R - values_R.double()))
    sums = over_ranks(torch.cat((both_2R.sum(1), torch.tensor([both_2R.shape[1]]))))
    num_tokens, means = float(sums[2]), sums[:2] / sums[2]
    of_returns, of_errors = over_ranks(((both_2R - means[:, None]) ** 2).sum(1)).tolist()
    # What rounding leaves of equal returns is no variance.
    return 1 - of_errors / of_returns if of_returns > num_tokens * (1e-12 * float(means[0])) ** 2 else None
