"""The returns state: what each response token is followed by, from its row's reward.

Shape letters: `R` packed response tokens that the model wrote.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmdrl.dataflow.samples.dock import Samples
from spmdrl.dataflow.stages.rows import ModelTokens
from spmdrl.types import Batch, WorkerState


class ReturnsStage:
    """Puts the Monte-Carlo return of each token. Collective: every rank calls it once per step."""

    state = WorkerState.RETURNS

    def __init__(self, gamma: float):
        self.gamma = gamma

    def __call__(self, samples: Samples) -> None:
        batch = samples.take(self.state)
        # Rows without a reward get no return; the advantage state drops them.
        rated = batch.select((~batch.dense("reward").isnan()).nonzero().squeeze(1))
        model_tokens, out = ModelTokens.of(rated), Batch(rated.rows)
        returns_R = monte_carlo_returns(rated.dense("reward"), model_tokens.lengths_B, self.gamma)
        out.put_ragged("returns", model_tokens.spread(returns_R), rated.offsets("response_ids"))
        samples.put(self.state, out)
        samples.commit(self.state)


def monte_carlo_returns(rewards_B: Tensor, lengths_B: Tensor, gamma: float) -> Tensor:
    """The return of each token [R]: gamma ** (tokens of its row after it) * reward (Sutton and Barto, eq. 3.8).

    The reward comes with the row's last token; what an environment wrote in between counts for nothing.
    """
    ends_B = lengths_B.cumsum(0)
    num_after_R = ends_B.repeat_interleave(lengths_B) - 1 - torch.arange(int(lengths_B.sum()))
    return rewards_B.repeat_interleave(lengths_B) * gamma**num_after_R
