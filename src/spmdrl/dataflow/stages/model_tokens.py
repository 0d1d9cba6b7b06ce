"""Which response tokens the model wrote, where an environment wrote the others.

The dock keeps rows as they are. Engines and algorithms get the model's tokens alone, so that nothing that the
environment wrote is rated, weighted, counted or learnt.

Shape letters: `R` packed response tokens that the model wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from torch import Tensor

from spmdrl.types import Batch, offsets_of

TURNS = "turns"
"""The column that rows of an environment have: the turn in which the model wrote a token, from 1, or 0."""


@dataclass(frozen=True)
class ModelTokens:
    """Where the model's tokens are among all packed response tokens of a batch."""

    offsets: Tensor
    """[B + 1]: row b has those between `offsets[b]` and `offsets[b + 1]`"""
    is_model: Tensor | None
    """bool, one per response token; None where the model wrote all"""

    @classmethod
    def of(cls, batch: Batch) -> ModelTokens:
        """Without the column `turns` the model wrote every token of `response_ids`."""
        offsets = batch.offsets("response_ids")
        if TURNS not in batch:
            return cls(offsets, None)
        is_model = batch.values(TURNS) > 0
        return cls(offsets_of(is_model)[offsets], is_model)

    @property
    def lengths_B(self) -> Tensor:
        """Tokens that the model wrote in each row."""
        return self.offsets.diff()

    def pick(self, values: Tensor) -> Tensor:
        """The values [R] of the model's tokens, from one per response token."""
        return values if self.is_model is None else values[self.is_model]

    def spread(self, values_R: Tensor) -> Tensor:
        """One value per response token: 0 where the environment wrote it."""
        if self.is_model is None:
            return values_R
        out = values_R.new_zeros(len(self.is_model))
        out[self.is_model] = values_R
        return out


def turn_texts(
    token_ids: Sequence[int], turns: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> list[tuple[str, str]]:
    """What the model wrote in each turn, and what the environment answered, or "" where it didn't."""
    texts: list[tuple[str, str]] = []
    for turn, run in groupby(zip(token_ids, turns, strict=True), key=itemgetter(1)):
        text = decode([token for token, _ in run])
        if turn:
            texts.append((text, ""))
        else:
            texts[-1] = (texts[-1][0], text)
    return texts
