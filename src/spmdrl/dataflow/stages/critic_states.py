"""The critic's states: the returns of response tokens, and the update that fits values to them.

Shape letters: `R` packed response tokens that the model wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from spmdrl.dataflow.samples.samples import Samples
from spmdrl.dataflow.samples.schema import COPIES
from spmdrl.dataflow.stages.rows import (
    TURN_REWARDS,
    ModelTokens,
    copies_of,
    credit_inputs,
    mini_batch_of_rows,
    piece_places,
    token_rows,
)
from spmdrl.dataflow.stages.update import UpdatePlan
from spmdrl.engines.training.packed_rows import LossTerms, MicroBatch, TokenRows
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.batch import Batch, CreditInputs, CreditSettings, WorkerState
from spmdrl.nouns.settings.role_configs import END_VALUE, CriticConfig
from spmdrl.observability.metrics import Recorder


class Rewarding(Protocol):
    """The part of an algorithm that this state calls."""

    def columns_for_returns(self) -> frozenset[str]: ...
    def token_rewards(self, inputs: CreditInputs) -> Tensor: ...


class ReturnsStage:
    """State that puts the returns of the tokens of this rank's rows. Collective: every rank calls it once per step."""

    state = WorkerState.RETURNS

    def __init__(self, config: CriticConfig, settings: CreditSettings):
        self.config = config
        self.settings = settings

    def __call__(self, samples: Samples, rewarding: Rewarding) -> None:
        batch = samples.take(self.state)
        turn_rewards = {TURN_REWARDS}.intersection(batch.names)
        names = sorted({*rewarding.columns_for_returns(), *self.config.columns_for_returns, *turn_rewards})
        inputs = credit_inputs(batch, names, samples.group_size, self.settings)
        values_R = inputs.columns.values("values") if "values" in names else None
        ends_B = inputs.columns.dense(END_VALUE) if self.config.bootstraps else None
        rewards_R, gamma, lam = rewarding.token_rewards(inputs), self.config.gamma, self.config.lam
        returns_R = lambda_returns(rewards_R, values_R, inputs.lengths_B, gamma=gamma, lam=lam, end_values_B=ends_B)
        # Returns of a row without a reward are NaN; the advantage state, which may wait for them, drops the row.
        out = Batch(batch.rows)
        out.put_ragged("returns", ModelTokens.of(batch).spread(returns_R.float()), batch.offsets("response_ids"))
        samples.put(self.state, out)
        samples.commit(self.state)


def lambda_returns(
    rewards_R: Tensor, values_R: Tensor | None, lengths_B: Tensor, *,
    gamma: float, lam: float, end_values_B: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the lambda-return of each token [R], in float64 (Sutton and Barto, Eq. 12.3, in its recursive form).

    G_t = r_t + gamma ((1 - lam) V_{t+1} + lam G_{t+1}); after a row's last token both are `end_values_B`, or 0. With
    lam 1 it is the Monte-Carlo return, which needs no values. G - V is the generalized advantage estimate
    (arXiv:1506.02438, Eq. 16). The next token is the model's next: tokens of an environment in between don't count.
    """
    returns_R, ends_B = torch.empty_like(rewards_R, dtype=torch.float64), lengths_B.cumsum(0)
    ends = torch.zeros(len(lengths_B)) if end_values_B is None else end_values_B
    next_B, next_value_B = (ends.to(torch.float64, copy=True) for _ in range(2))
    for num_after in range(int(lengths_B.max()) if len(lengths_B) else 0):
        rows = (lengths_B > num_after).nonzero().squeeze(1)
        places = ends_B[rows] - 1 - num_after
        next_B[rows] = rewards_R[places] + gamma * ((1 - lam) * next_value_B[rows] + lam * next_B[rows])
        returns_R[places] = next_B[rows]
        if values_R is not None:
            next_value_B[rows] = values_R[places].double()
    return returns_R


class CriticUpdateStage:
    """State that trains the critic on the policy's rows. Collective: every rank calls it once per step."""

    state = WorkerState.CRITIC_UPDATE

    def __init__(self, engine: TrainingEngine, config: CriticConfig, plan: UpdatePlan, recorder: Recorder):
        self.engine = engine
        self.config = config
        self.plan = plan
        self.recorder = recorder

    def __call__(self, samples: Samples) -> None:
        # Rows wait for their advantages, since rows without any are dropped; the critic itself needs none.
        batch = samples.take(self.state, samples.rows.reads(self.state) - {"advantages"})
        rows, places_B = token_rows(batch, self.engine.config, ("values", "returns", COPIES)), piece_places(batch)
        copies_B = copies_of(batch)[places_B]
        self._report_fit(rows, copies_B)
        part_B = mini_batch_of_rows(batch.rows[places_B], samples.rows, self.plan.updates_per_epoch)
        for _ in range(self.plan.epochs):
            for part in range(self.plan.updates_per_epoch):
                members = (part_B == part).nonzero().squeeze(1)
                self._one_update(rows.select(members), copies_B[members])
        samples.commit(self.state)

    def _one_update(self, rows: TokenRows, copies_B: Tensor) -> None:
        """Make one optimizer step, unless every row of this part was dropped, on all ranks alike."""
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
        """Report how well the values before the update fit the returns. Collective over the data axes."""
        copies_R = copies_B.repeat_interleave(rows.response_offsets.diff())
        values_R, returns_R = (rows.response[name].repeat_interleave(copies_R) for name in ("values", "returns"))
        explained = explained_variance(values_R, returns_R, self.engine.mesh.data.sum)
        if explained is not None:
            self.recorder.mean("critic/explained_variance", explained)


@dataclass(frozen=True)
class ValueLoss:
    """0.5 * max((V - R)^2, (V_clipped - R)^2), averaged over all tokens of an optimizer step (PPO, arXiv:1707.06347).

    V_clipped is V, clipped to `clip` around the value before the update.
    """

    num_tokens: int
    """number of tokens of the optimizer step, on all ranks together"""
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
    """Return 1 - Var(R - V) / Var(R) over all ranks' tokens, in float64; None if all returns are equal.

    `over_ranks` sums a tensor over the ranks with other rows.
    """
    returns_R = returns_R.double()
    both_2R = torch.stack((returns_R, returns_R - values_R.double()))
    sums = over_ranks(torch.cat((both_2R.sum(1), torch.tensor([both_2R.shape[1]]))))
    num_tokens, means = float(sums[2]), sums[:2] / sums[2]
    of_returns, of_errors = over_ranks(((both_2R - means[:, None]) ** 2).sum(1)).tolist()
    # Rounding errors of equal returns are no variance.
    return 1 - of_errors / of_returns if of_returns > num_tokens * (1e-12 * float(means[0])) ** 2 else None
