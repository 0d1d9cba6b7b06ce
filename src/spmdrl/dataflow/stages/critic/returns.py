"""The returns state: what each response token is followed by, from the rewards of its row.

Shape letters: `R` packed response tokens that the model wrote.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from spmdrl.dataflow.samples.dock import Samples
from spmdrl.dataflow.stages.critic.critic_config import CriticConfig
from spmdrl.dataflow.stages.rows import ModelTokens, credit_inputs
from spmdrl.types import Batch, CreditInputs, WorkerState


class Rewarding(Protocol):
    """The part of an algorithm that this state calls."""

    def columns_for_returns(self) -> frozenset[str]: ...
    def token_rewards(self, inputs: CreditInputs) -> Tensor: ...


class ReturnsStage:
    """Puts the return of each token of the rows that this rank took. Collective: every rank calls it once per step."""

    state = WorkerState.RETURNS

    def __init__(self, config: CriticConfig):
        self.config = config

    def __call__(self, samples: Samples, rewarding: Rewarding) -> None:
        batch = samples.take(self.state)
        # Rows without a reward get no return; the advantage state drops them.
        rated = batch.select((~batch.dense("reward").isnan()).nonzero().squeeze(1))
        names = sorted({*rewarding.columns_for_returns(), *self.config.columns_for_returns})
        inputs = credit_inputs(rated, names, samples.group_size)
        values_R = inputs.columns.values("values") if "values" in names else None
        returns_R = lambda_returns(
            rewarding.token_rewards(inputs), values_R, inputs.lengths_B, gamma=self.config.gamma, lam=self.config.lam
        )
        out = Batch(rated.rows)
        out.put_ragged("returns", ModelTokens.of(rated).spread(returns_R.float()), rated.offsets("response_ids"))
        samples.put(self.state, out)
        samples.commit(self.state)


def lambda_returns(
    rewards_R: Tensor, values_R: Tensor | None, lengths_B: Tensor, *, gamma: float, lam: float
) -> Tensor:
    """The lambda-return of each token [R], in float64 (Sutton and Barto, Eq. 12.3, in its recursive form).

    G_t = r_t + gamma ((1 - lam) V_{t+1} + lam G_{t+1}); behind a row's last token both are 0. With lam 1 it is the
    Monte-Carlo return, which needs no values. G - V is the generalized advantage estimate (arXiv:1506.02438, Eq. 16).
    The next token is the next that the model wrote: what an environment wrote in between counts for nothing.
    """
    returns_R, ends_B = torch.empty_like(rewards_R, dtype=torch.float64), lengths_B.cumsum(0)
    next_B = torch.zeros(len(lengths_B), dtype=torch.float64)
    next_value_B = torch.zeros_like(next_B)
    for num_after in range(int(lengths_B.max()) if len(lengths_B) else 0):
        rows = (lengths_B > num_after).nonzero().squeeze(1)
        places = ends_B[rows] - 1 - num_after
        next_B[rows] = rewards_R[places] + gamma * ((1 - lam) * next_value_B[rows] + lam * next_B[rows])
        returns_R[places] = next_B[rows]
        if values_R is not None:
            next_value_B[rows] = values_R[places].double()
    return returns_R
