"""From columns of the dock to the packed rows that engines take."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from spmdrl.engines.training.rows import TokenRows
from spmdrl.types import Batch, offsets_of


def join_ragged(batch: Batch, first: str, second: str) -> tuple[Tensor, Tensor]:
    """Values and offsets of rows that hold `first`'s run, then `second`'s."""
    first_lengths, second_lengths = batch.lengths(first), batch.lengths(second)
    offsets = offsets_of(first_lengths + second_lengths)
    out = torch.empty(int(offsets[-1]), dtype=batch.values(first).dtype)
    starts = offsets[:-1]
    out[_positions(starts, first_lengths)] = batch.values(first)
    out[_positions(starts + first_lengths, second_lengths)] = batch.values(second)
    return out, offsets


def _positions(starts_B: Tensor, lengths_B: Tensor) -> Tensor:
    within = torch.arange(int(lengths_B.sum())) - offsets_of(lengths_B)[:-1].repeat_interleave(lengths_B)
    return starts_B.repeat_interleave(lengths_B) + within


def token_rows(batch: Batch, response_columns: Iterable[str] = ()) -> TokenRows:
    """Prompt and response of each row as one run, with the named columns for each response token."""
    tokens_T, offsets = join_ragged(batch, "prompt_ids", "response_ids")
    response = {name: batch.values(name) for name in response_columns}
    return TokenRows(tokens_T, offsets, batch.lengths("prompt_ids"), response=response, dense={})
