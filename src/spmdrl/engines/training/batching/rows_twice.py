"""A micro-batch that goes through the model as two copies in one pass, of which only the first meets the adapters.

    computed         p0 p1 a0 a1 b0 | p0 p1 a0 a1 b0
    adapters         added          | none

Each copy is laid out, attended to and rated as the micro-batch alone is. Only operations that treat each token by
itself see both.

Shape letters: `T` packed tokens of both copies, `P` places to rate in one of them; `D` model width, `V` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spmdrl.engines.models.layers import Attend
from spmdrl.engines.training.batching.packed_rows import MicroBatch
from spmdrl.engines.training.heads import TokenHead


def twice(micro: MicroBatch) -> MicroBatch:
    """Two copies of a micro-batch's tokens, one behind the other; places and targets stay those of one."""
    return replace(
        micro,
        tokens_T=micro.tokens_T.repeat(2),
        positions_T=micro.positions_T.repeat(2),
        row_T=micro.row_T.repeat(2),
        attend=AttendTwice(micro.attend),
    )


@dataclass(frozen=True)
class AttendTwice:
    """Attention inside each copy."""

    attend: Attend
    """Of one copy."""

    def __call__(self, layer: int, q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor) -> Tensor:
        copies = zip(q_THK.chunk(2), k_TJK.chunk(2), v_TJU.chunk(2), strict=True)
        return torch.cat([self.attend(layer, *heads) for heads in copies])


@dataclass(frozen=True)
class RateTwice:
    """The ratings of the first copy, then those of the second."""

    head: TokenHead
    """Of one copy."""

    def __call__(self, hidden_TD: Tensor, weight_VD: Tensor) -> tuple[Tensor, ...]:
        first, second = (self.head(hidden, weight_VD) for hidden in hidden_TD.chunk(2))
        return *first, *second
