"""What an engine puts on a micro-batch's hidden states: log-probabilities for a policy, values for critic and reward.

Each is made for one micro-batch and handed to the decoder, which calls it inside its own forward. Under tensor
parallelism it gets this rank's share of the tokens and answers for all of them.

Shape letters: `T` packed tokens of the micro-batch, or this rank's equal share of them; `P` places to rate; `D` model
width; `V` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.engines.parallel.axis_collectives import gather_own_gradient, gather_rows
from spmdrl.engines.parallel.vocabulary import VocabularyPart
from spmdrl.engines.training.logprobs import logprobs_and_entropy
from spmdrl.resources.mesh import Axis


class TokenHead(Protocol):
    """Rates places of one micro-batch by their hidden states."""

    def __call__(self, hidden_TD: Tensor, weight_VD: Tensor) -> tuple[Tensor, ...]:
        """Return float32 tensors [P], the same on all ranks of the tensor axis. Collective over that axis.

        A tuple even of one, because FSDP2 looks for tensors with gradients in what a forward returns.
        """
        ...


@dataclass(frozen=True)
class LogprobHead:
    """Log-probability of the token after each place, and the entropy it was drawn from: a language model's head."""

    places_P: Tensor
    """The tokens that predict, by their place in the micro-batch."""
    targets_P: Tensor
    """The token after each of them."""
    vocabulary: VocabularyPart
    temperature: float = 1.0

    def __call__(self, hidden_TD: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor]:
        hidden_PD = gather_rows(hidden_TD, self.vocabulary.axis)[self.places_P]
        return logprobs_and_entropy(
            hidden_PD, weight_VD, self.targets_P, temperature=self.temperature, vocabulary=self.vocabulary
        )


@dataclass(frozen=True)
class ValueHead:
    """One number a place: a critic's value before each response token, or a reward model's score at a row's end.

    The weight [1, D] is whole on every rank of the tensor axis. Each rank rates its own tokens, so that its gradient
    is a part of a sum over the axis, as of every weight that isn't cut.
    """

    places_P: Tensor
    """The tokens to rate, by their place in the micro-batch."""
    tensor: Axis

    def __call__(self, hidden_TD: Tensor, weight_VD: Tensor) -> tuple[Tensor]:
        # In float32: a bfloat16 value would keep three digits of a return.
        own_T = F.linear(hidden_TD.to(torch.float32), weight_VD.to(torch.float32)).squeeze(1)
        values_T = gather_own_gradient(own_T, [len(own_T)] * self.tensor.size, self.tensor)
        return (values_T[self.places_P],)
