"""Packed rows of queries beside packed rows of keys of other lengths, and their padded blocks.

Shape letters: `B` rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from spmdrl.engines.models.kernels.packed import group_rows
from spmdrl.nouns.batch import offsets_of
from spmdrl.resources.device import to_device

Places = slice | Tensor
"""Indexes along dim 0; a slice if they are consecutive, which saves copies."""


def as_places(index: Tensor, device: torch.device) -> Places:
    """Return a host index on the device, or the equivalent slice."""
    first = int(index[0]) if index.numel() else 0
    if torch.equal(index, torch.arange(first, first + index.numel())):
        return slice(first, first + index.numel())
    return to_device(index, device)


@dataclass(frozen=True)
class PaddedSide:
    """Queries, or keys, of some rows as one right-padded block."""

    of_slot: Places
    """[rows x longest] the token at each slot; a padded slot repeats its row's last token"""
    slots: Places
    """Slots with a token of their own."""
    tokens: Places
    """Tokens at `slots`."""
    padding: Tensor | None
    """[rows, 1, longest, 1] bool, true at slots without a token of their own; None without padding"""


@dataclass(frozen=True)
class PaddedGroup:
    """Rows of similar length, padded."""

    num_rows: int
    queries: PaddedSide
    keys: PaddedSide
    key_mask: Tensor | None
    """[rows, 1, 1, longest] float32, 0 at a key and -inf at padding; None if no query would see padding"""


class RowPairs:
    """Rows of queries, each with its row of keys, both packed in row order."""

    def __init__(
        self, query_lengths_B: Sequence[int], key_lengths_B: Sequence[int], *, is_causal: bool, device: torch.device
    ):
        """`is_causal` hides later keys from earlier queries, in rows with as many keys as queries."""
        assert not is_causal or list(query_lengths_B) == list(key_lengths_B), (query_lengths_B, key_lengths_B)
        self.query_lengths_B, self.key_lengths_B = list(query_lengths_B), list(key_lengths_B)
        self.is_causal, self.device = is_causal, device

    # Flash attention on packed rows needs the offsets only, other kernels the groups only.
    @cached_property
    def query_offsets(self) -> Tensor:
        """[B + 1] int32, on the device."""
        return to_device(offsets_of(self.query_lengths_B).to(torch.int32), self.device)

    @cached_property
    def key_offsets(self) -> Tensor:
        """[B + 1] int32, on the device."""
        return to_device(offsets_of(self.key_lengths_B).to(torch.int32), self.device)

    @cached_property
    def groups(self) -> tuple[PaddedGroup, ...]:
        """All rows that have queries, in padded blocks."""
        return tuple(self._group(rows) for rows in group_rows(self.query_lengths_B))

    def _group(self, rows: list[int]) -> PaddedGroup:
        queries = _padded(self.query_lengths_B, rows, self.device)
        keys = _padded(self.key_lengths_B, rows, self.device)
        if self.is_causal or keys.padding is None:
            return PaddedGroup(len(rows), queries, keys, None)
        mask = torch.zeros(keys.padding.shape, device=self.device).masked_fill_(keys.padding, -torch.inf).mT
        return PaddedGroup(len(rows), queries, keys, mask)


def _padded(lengths_B: Sequence[int], rows: list[int], device: torch.device) -> PaddedSide:
    starts = offsets_of(lengths_B)[rows][:, None]
    lengths = torch.tensor([lengths_B[row] for row in rows])[:, None]
    column = torch.arange(int(lengths.max()))
    is_own = column < lengths
    of_slot = (starts + torch.minimum(column, lengths - 1)).flatten()
    slots = is_own.flatten().nonzero().flatten()
    return PaddedSide(
        of_slot=as_places(of_slot, device),
        slots=as_places(slots, device),
        tokens=as_places(of_slot[slots], device),
        padding=None if bool(is_own.all()) else to_device(~is_own[:, None, :, None], device),
    )
