"""Rows that share their first tokens, computed once, in the form of attention kernels.

Everything but attention sees each token once. Attention copies tokens to make rows contiguous, inside one call; the
gradients of copies are summed in a fixed order.

Shape letters: `T` packed tokens, `H` query heads, `J` key and value heads, `K` head size, `U` head size of values. A
*slot* is a place among the copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from spmdrl.engines.models.kernels.packed import (
    Block,
    PackedRows,
    RowTable,
    Segments,
    Sinks,
    Window,
    attend_blocks,
    plan_blocks,
)
from spmdrl.nouns.batch import offsets_of
from spmdrl.resources.device import to_device


@dataclass(frozen=True)
class Copies:
    """Copies of a tensor's rows to slots, some of them several times."""

    index: Tensor
    """[slots] row copied to each"""
    rounds: tuple[tuple[Tensor, Tensor], ...]
    """Slots whose gradients count, with their rows in ascending order; a round has no duplicate rows"""

    @classmethod
    def of(cls, index: Tensor, padded_slots: Tensor | None = None) -> Copies:
        """Plan copies of these rows, on the host; padded slots have no gradient."""
        counts = torch.ones(index.shape, dtype=torch.bool)
        if padded_slots is not None:
            counts[padded_slots] = False
        slots = counts.nonzero().flatten()
        rows, order = index[slots].sort(stable=True)
        # Number of each copy among its row's.
        number = torch.arange(rows.numel()) - torch.searchsorted(rows, rows)
        by_number, by_copy = number.sort(stable=True)
        sizes = by_number.bincount().tolist()
        return cls(index, tuple(zip(slots[order][by_copy].split(sizes), rows[by_copy].split(sizes), strict=True)))

    def to(self, device: torch.device) -> Copies:
        rounds = tuple((to_device(slots, device), to_device(rows, device)) for slots, rows in self.rounds)
        return Copies(to_device(self.index, device), rounds)


def copy_rows(values: Tensor, copies: Copies) -> Tensor:
    """Return the copies [slots, ...]; backward sums each row's gradients in the order of its slots."""
    return _CopyRows.apply(values, copies)


class _CopyRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, copies: Copies) -> Tensor:
        ctx.num_rows, ctx.copies = len(values), copies
        return values.index_select(0, copies.index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        rounds = ctx.copies.rounds
        if rounds and len(rounds[0][0]) == ctx.num_rows:
            out, rounds = gradient.index_select(0, rounds[0][0]), rounds[1:]
        else:
            out = gradient.new_zeros(ctx.num_rows, *gradient.shape[1:])
        for slots, rows in rounds:
            out.index_add_(0, rows, gradient.index_select(0, slots))
        return out, None


@dataclass(frozen=True)
class PrefixedPlan:
    """Whole rows in padded blocks, laid out by `plan_blocks`."""

    blocks: tuple[Block, ...]
    tokens: Copies
    """Token of each slot."""
    results: Copies
    """[T] slot of each token in its first row"""


@dataclass(frozen=True)
class PackedKeys:
    """Keys of each row after a prefix, end to end without padding."""

    keys: Copies
    rows: PackedRows
    """Rows as long as their keys."""
    offsets: list[int]
    """Offsets of the rows' own tokens, which are the queries."""
    ends: Tensor
    """`offsets` on the device, int32"""
    longest: int
    """Largest number of queries in a row."""


class PrefixedRows:
    """Rows of a micro-batch: pieces that are prefixes or whole rows, then the rows' own tokens after a prefix.

    Each piece attends to itself, and own tokens after a prefix also to that.
    """

    def __init__(self, offsets: Tensor, lengths: Sequence[int], prefixes: Sequence[int]):
        """Offsets of the first pieces; then, for each row after a prefix, its own tokens and that piece's number."""
        assert all(lengths), "a row after its prefix has tokens"
        self.first, self.num_first = PackedRows(offsets), int(offsets[-1])
        self._starts, self._lengths, self._prefixes = offsets.tolist(), list(lengths), list(prefixes)
        self._plans: dict[torch.device, PrefixedPlan] = {}
        self._packed: dict[torch.device, PackedKeys] = {}
        self._ends: dict[torch.device, Copies] = {}

    @cached_property
    def own(self) -> PackedRows:
        """Own tokens of rows after a prefix, as rows."""
        return PackedRows(offsets_of(self._lengths))

    @property
    def segments(self) -> Segments:
        """Pieces that hold tokens, then own tokens of rows after a prefix."""
        held = [number for number, (start, stop) in enumerate(pairwise(self._starts)) if stop > start]
        behind = [self.num_first + stop for stop in accumulate(self._lengths)]
        predecessors = [-1] * len(held) + [held.index(prefix) for prefix in self._prefixes]
        return Segments([*self.first.offsets, *behind], predecessors)

    def before_own(self, ends: Tensor) -> Tensor:
        """Return that of its prefix for each row after one, from the states [B, ...] with which pieces end."""
        if ends.device not in self._ends:
            held = [number for number, (start, stop) in enumerate(pairwise(self._starts)) if stop > start]
            index = torch.tensor([held.index(prefix) for prefix in self._prefixes])
            self._ends[ends.device] = Copies.of(index).to(ends.device)
        return copy_rows(ends, self._ends[ends.device])

    def followers(self) -> list[Tensor]:
        """Return the tokens of each row after a prefix: the prefix's, then its own."""
        pieces = self._pieces()
        return [torch.cat((pieces[prefix], own)) for prefix, own in self._behind()]

    def whole_rows(self) -> list[Tensor]:
        """Return the tokens of every row, all of its own or after a prefix."""
        return [torch.cat(row) for row in self._rows_in_parts()]

    @cached_property
    def table(self) -> RowTable:
        """Return each piece that has tokens, followed by the rows that it is the prefix of."""
        groups = [[(start, stop - start, 0, 0)] if stop > start else [] for start, stop in pairwise(self._starts)]
        start = self.num_first
        for prefix, length in zip(self._prefixes, self._lengths, strict=True):
            first, stop = self._starts[prefix : prefix + 2]
            groups[prefix].append((start, length, first, stop - first))
            start += length
        rows = torch.tensor([row for group in groups for row in group], dtype=torch.int64).view(-1, 4)
        return RowTable(rows, torch.tensor([len(group) for group in groups], dtype=torch.int64).cumsum(0))

    def padded(self, device: torch.device) -> PrefixedPlan:
        """Return whole rows in padded blocks, with their indexes on a device."""
        if device not in self._plans:
            rows = self._rows_in_parts()
            lengths = [sum(map(len, row)) for row in rows]
            plan = plan_blocks(offsets_of(lengths).tolist())
            whole = torch.cat([part for row in rows for part in row])
            tokens = Copies.of(whole[plan.token_of_slot], plan.padded_slots)
            # The first round has every token.
            results = Copies.of(plan.slot_of_token[Copies.of(whole).rounds[0][0]])
            self._plans[device] = PrefixedPlan(plan.blocks, tokens.to(device), results.to(device))
        return self._plans[device]

    def packed(self, device: torch.device) -> PackedKeys:
        """Return the keys of rows after prefixes, with their indexes on a device."""
        if device not in self._packed:
            rows, offsets = self.followers(), offsets_of(self._lengths)
            self._packed[device] = PackedKeys(
                Copies.of(torch.cat(rows)).to(device),
                PackedRows(offsets_of([len(row) for row in rows])),
                offsets.tolist(),
                to_device(offsets.to(torch.int32), device),
                max(self._lengths),
            )
        return self._packed[device]

    def _rows_in_parts(self) -> list[tuple[Tensor, ...]]:
        """Return the tokens of every row in one or two parts."""
        pieces, prefixes = self._pieces(), set(self._prefixes)
        alone = [(piece,) for number, piece in enumerate(pieces) if number not in prefixes]
        return [*alone, *((pieces[prefix], own) for prefix, own in self._behind())]

    def _behind(self) -> Iterator[tuple[int, Tensor]]:
        """Yield, for each row after a prefix, that piece's number and the row's own tokens."""
        own = torch.arange(self.num_first, self.num_first + sum(self._lengths)).split(self._lengths)
        return zip(self._prefixes, own, strict=True)

    def _pieces(self) -> tuple[Tensor, ...]:
        lengths = [stop - start for start, stop in pairwise(self._starts)]
        return torch.arange(self.num_first).split(lengths)


def padded_prefixed_attention(
    q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor, rows: PrefixedRows, window: Window = None, sinks_H: Sinks = None
) -> Tensor:
    """Compute `ops.prefixed_attention`, with the bits of whole rows that share nothing.

    A prefix gets its first row's result.
    """
    plan = rows.padded(q_THK.device)
    queries, keys, values = (copy_rows(heads, plan.tokens) for heads in (q_THK, k_TJK, v_TJU))
    return copy_rows(attend_blocks(queries, keys, values, plan.blocks, window, sinks_H), plan.results)
