"""The returns state: what each response token is followed by, from the rewards of its row.

Shape letters: `R` packed response tokens that the model wrote.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from spmdrl.dataflow.samples.samples import Samples
from spmdrl.dataflow.stages.rows import ModelTokens, credit_inputs
from spmdrl.nouns.batch import Batch, CreditInputs, CreditSettings, WorkerState
from spmdrl.nouns.settings.role_configs import END_VALUE, CriticConfig


class Rewarding(Protocol):
    """The part of an algorithm that this state calls."""

    def columns_for_returns(self) -> frozenset[str]: ...
    def token_rewards(self, inputs: CreditInputs) -> Tensor: ...


class ReturnsStage:
    """Puts the return of each token of the rows that this rank took. Collective: every rank calls it once per step."""

    state = WorkerState.RETURNS

    def __init__(self, config: CriticConfig, settings: CreditSettings):
        self.config = config
        self.settings = settings

    def __call__(self, samples: Samples, rewarding: Rewarding) -> None:
        batch = samples.take(self.state)
        names = sorted({*rewarding.columns_for_returns(), *self.config.columns_for_returns})
        inputs = credit_inputs(batch, names, samples.group_size, self.settings)
        values_R = inputs.columns.values("values") if "values" in names else None
        ends_B = inputs.columns.dense(END_VALUE) if self.config.bootstraps else None
        rewards_R, gamma, lam = rewarding.token_rewards(inputs), self.config.gamma, self.config.lam
        returns_R = lambda_returns(rewards_R, values_R, inputs.lengths_B, gamma=gamma, lam=lam, end_values_B=ends_B)
        # The returns of a row without a reward are NaN; the advantage state, which may wait for them, drops it.
        out = Batch(batch.rows)
        out.put_ragged("returns", ModelTokens.of(batch).spread(returns_R.float()), batch.offsets("response_ids"))
        samples.put(self.state, out)
        samples.commit(self.state)


def lambda_returns(
    rewards_R: Tensor, values_R: Tensor | None, lengths_B: Tensor, *,
    gamma: float, lam: float, end_values_B: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The lambda-return of each token [R], in float64 (Sutton and Barto, Eq. 12.3, in its recursive form).

    G_t = r_t + gamma ((1 - lam) V_{t+1} + lam G_{t+1}); behind a row's last token both are `end_values_B`, or 0. With
    lam 1 it is the
    Monte-Carlo return, which needs no values. G - V is the generalized advantage estimate (arXiv:1506.02438, Eq. 16).
    The next token is the next that the model wrote: what an environment wrote in between counts for nothing.
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
