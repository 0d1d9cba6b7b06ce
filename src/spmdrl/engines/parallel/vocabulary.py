"""The part of the vocabulary that a rank of the tensor axis holds, of embedding and head alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.engines.parallel.weight_cuts import chunk_of
from spmdrl.resources.mesh import Axis


@dataclass(frozen=True)
class VocabularyPart:
    """The tokens whose rows of the embedding and of the head this rank holds."""

    start: int
    stop: int
    widest: int
    """Tokens of the largest part; the last one may be smaller."""
    size: int
    """Tokens of the whole vocabulary."""
    axis: Axis
    """The ranks that hold the parts."""

    @classmethod
    def of(cls, vocab_size: int, axis: Axis) -> VocabularyPart:
        """The part of a rank of the tensor axis."""
        start, stop = chunk_of(vocab_size, axis.size, axis.rank)
        return cls(start, stop, -(-vocab_size // axis.size), vocab_size, axis)

    def local(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's place in this part, and whether it is in it at all; other parts' tokens are put at place 0."""
        here = (tokens >= self.start) & (tokens < self.stop)
        return torch.where(here, tokens - self.start, 0), here
