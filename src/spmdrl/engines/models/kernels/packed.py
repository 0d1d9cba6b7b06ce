"""Packed rows for attention kernels: by their ends, or in padded blocks of rows of similar length.

Padding exists only inside one attention call: the rest of the decoder sees packed tokens. Indexes are made once per
micro-batch and serve all its layers.

Shape letters: `T` packed tokens, `H` query heads, `J` key and value heads, `K` head size, `U` head size of values,
`B` rows of a block, `Q` its length. A *slot* is a place in a padded block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.resources.device import to_device

Window = int | None
"""Number of keys that a query sees, of which its own is the last; None: all"""
Sinks = Tensor | None
"""[H] score, unscaled, of one more key without a value in the softmax of all queries of a head; None: no such key"""

# One more attention call costs a CPU about as much as a few dozen padded tokens, so short rows share a block even if
# their lengths differ by half, and long rows only if padding adds little.
_SHORT_SPREAD = 16
_LONG_SPREAD_DIVISOR = 16


def group_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Split the rows that hold tokens into groups of similar length, ascending inside a group and by first row.

    In that order rows of equal lengths, and rows alone in their group, keep their place in memory.
    """
    descending = sorted((row for row, length in enumerate(lengths) if length), key=lambda row: -lengths[row])
    groups: list[list[int]] = []
    shortest_allowed = 0
    for row in descending:
        if not groups or lengths[row] < shortest_allowed:
            groups.append([])
            shortest_allowed = lengths[row] - max(_SHORT_SPREAD, lengths[row] // _LONG_SPREAD_DIVISOR)
        groups[-1].append(row)
    return sorted(sorted(group) for group in groups)


@dataclass(frozen=True)
class Block:
    """A run of slots that holds `num_rows` rows padded to `length`."""

    start: int
    num_rows: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.num_rows * self.length


@dataclass(frozen=True)
class PaddedPlan:
    """Map between packed tokens and the padded blocks."""

    blocks: tuple[Block, ...]
    token_of_slot: Tensor
    """[slots] token copied there; a padded slot repeats its row's last token."""
    slot_of_token: Tensor
    """[T]"""
    padded_slots: Tensor
    """Slots without a token of their own."""
    is_identity: bool
    """True if slots and tokens coincide, so that nothing need be copied."""

    def to(self, device: torch.device) -> PaddedPlan:
        return replace(
            self,
            token_of_slot=to_device(self.token_of_slot, device),
            slot_of_token=to_device(self.slot_of_token, device),
            padded_slots=to_device(self.padded_slots, device),
        )


def plan_blocks(offsets: Sequence[int]) -> PaddedPlan:
    """Lay rows with these offsets [B + 1] into padded blocks, right-padded so that causality hides the padding."""
    lengths = [stop - start for start, stop in zip(offsets[:-1], offsets[1:], strict=True)]
    blocks: list[Block] = []
    order: list[int] = []
    for rows in group_rows(lengths):
        length = max(lengths[row] for row in rows)
        blocks.append(Block(blocks[-1].stop if blocks else 0, len(rows), length))
        order += rows
    return _padded_plan(blocks, [offsets[row] for row in order], [lengths[row] for row in order])


def _padded_plan(blocks: Sequence[Block], starts: Sequence[int], lengths: Sequence[int]) -> PaddedPlan:
    """Lay runs of tokens with these starts and lengths into the blocks, in their order."""
    tokens: list[Tensor] = [torch.empty(0, dtype=torch.int64)]
    is_padding: list[Tensor] = [torch.empty(0, dtype=torch.bool)]
    sizes = [block.num_rows for block in blocks]
    runs = zip(torch.tensor(starts).split(sizes), torch.tensor(lengths).split(sizes), strict=True)
    for block, (first, length) in zip(blocks, runs, strict=True):
        last, column = length[:, None] - 1, torch.arange(block.length)
        tokens.append((first[:, None] + torch.minimum(column, last)).flatten())
        is_padding.append((column > last).flatten())
    token_of_slot, padding = torch.cat(tokens), torch.cat(is_padding)
    real_slots = (~padding).nonzero().flatten()
    slot_of_token = torch.empty_like(real_slots)
    slot_of_token[token_of_slot[real_slots]] = real_slots
    is_identity = torch.equal(token_of_slot, torch.arange(len(real_slots)))
    return PaddedPlan(tuple(blocks), token_of_slot, slot_of_token, padding.nonzero().flatten(), is_identity)


@dataclass(frozen=True)
class ChunkPlan:
    """Rows cut into chunks of one size, the last of each padded: first all rows' first chunks, then their second."""

    slots: PaddedPlan
    """One block, of all chunks."""
    counts: tuple[int, ...]
    """Number of rows that have a first chunk, a second, and so on: the first rows of `order`."""
    order: Tensor
    """[B] rows, longest first"""
    places: Tensor
    """[B] place of each row in `order`"""

    @classmethod
    def of(cls, offsets: Sequence[int], size: int) -> ChunkPlan:
        rows = sorted(zip(offsets[:-1], offsets[1:], strict=True), key=lambda row: row[0] - row[1])
        shifts = range(0, rows[0][1] - rows[0][0], size)
        chunks = [
            [(start + shift, min(size, stop - start - shift)) for start, stop in rows if start + shift < stop]
            for shift in shifts
        ]
        starts, lengths = zip(*(chunk for of_shift in chunks for chunk in of_shift), strict=True)
        places = torch.tensor([start for start, _ in rows]).argsort()
        slots = _padded_plan([Block(0, len(starts), size)], starts, lengths)
        return cls(slots, tuple(map(len, chunks)), places.argsort(), places)

    def to(self, device: torch.device) -> ChunkPlan:
        return replace(
            self,
            slots=self.slots.to(device),
            order=to_device(self.order, device),
            places=to_device(self.places, device),
        )


@dataclass(frozen=True)
class RowTable:
    """Places of rows, and of prefixes before them, among packed tokens, on the host, as int64."""

    rows: Tensor
    """[rows, 4]: a row's first token and number of tokens, then its prefix's; 0 tokens for none"""
    group_ends: Tensor
    """[groups] ends of groups of rows; rows with a common prefix, and that prefix, are in one"""


class Segments(NamedTuple):
    """Packed runs of tokens, each by itself or behind another one of its row."""

    offsets: Sequence[int]
    """Strictly ascending."""
    predecessors: Sequence[int]
    """Number of the segment before each in its row, or -1."""


class PackedRows:
    """Rows of a micro-batch that hold tokens, laid end to end."""

    def __init__(self, offsets: Tensor):
        """Rows with these offsets [B + 1]; pass them on the CPU to avoid waiting for the device."""
        # Rows without tokens attend to nothing, and some kernels refuse them.
        self.offsets = list(dict.fromkeys(offsets.tolist()))
        """Strictly ascending."""
        self._cumulative: dict[torch.device, Tensor] = {}
        self._padded: dict[torch.device, PaddedPlan] = {}
        self._chunks: dict[torch.device, ChunkPlan] = {}

    @cached_property
    def lengths(self) -> list[int]:
        return [stop - start for start, stop in zip(self.offsets[:-1], self.offsets[1:], strict=True)]

    @property
    def segments(self) -> Segments:
        return Segments(self.offsets, [-1] * len(self.lengths))

    @cached_property
    def longest(self) -> int:
        return max(self.lengths, default=0)

    @cached_property
    def table(self) -> RowTable:
        rows = [(start, length, 0, 0) for start, length in zip(self.offsets, self.lengths, strict=False)]
        return RowTable(torch.tensor(rows, dtype=torch.int64).view(-1, 4), torch.arange(1, len(rows) + 1))

    def cumulative(self, device: torch.device) -> Tensor:
        """Return the offsets as int32 on a device."""
        if device not in self._cumulative:
            self._cumulative[device] = to_device(torch.tensor(self.offsets, dtype=torch.int32), device)
        return self._cumulative[device]

    def padded(self, device: torch.device) -> PaddedPlan:
        """Return padded blocks of rows of similar length, with their indexes on a device."""
        if device not in self._padded:
            self._padded[device] = plan_blocks(self.offsets).to(device)
        return self._padded[device]

    def chunks(self, largest: int, device: torch.device) -> ChunkPlan:
        """Return chunks of at most this size, which is the same in all calls, with their indexes on a device."""
        if device not in self._chunks:
            self._chunks[device] = ChunkPlan.of(self.offsets, min(largest, self.longest)).to(device)
        return self._chunks[device]


def to_slots(tokens: Tensor, plan: PaddedPlan) -> Tensor:
    """Return the slots' values; padded slots, which repeat a token, have no gradient."""
    return tokens if plan.is_identity else _ToSlots.apply(tokens, plan)


def from_slots(slots: Tensor, plan: PaddedPlan) -> Tensor:
    """Return the tokens' values."""
    return slots if plan.is_identity else _FromSlots.apply(slots, plan)


# Each token has one slot, so both backward passes are gathers too: no scatter-add, no order of summation.
class _ToSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, plan: PaddedPlan) -> Tensor:
        ctx.plan = plan
        return tokens.index_select(0, plan.token_of_slot)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # A padded slot's gradient is zero, because its output is dropped.
        return gradient.index_select(0, ctx.plan.slot_of_token), None


class _FromSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slots: Tensor, plan: PaddedPlan) -> Tensor:
        ctx.plan = plan
        return slots.index_select(0, plan.slot_of_token)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        at_slots = gradient.index_select(0, ctx.plan.token_of_slot)
        return at_slots.index_fill_(0, ctx.plan.padded_slots, 0), None


def padded_attention(
    q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor, rows: PackedRows, window: Window = None, sinks_H: Sinks = None
) -> Tensor:
    """Compute `ops.packed_attention` in padded blocks of rows of similar length."""
    plan = rows.padded(q_THK.device)
    if not plan.blocks:
        return nothing_attended(q_THK, k_TJK, v_TJU)
    queries, keys, values = (to_slots(heads, plan) for heads in (q_THK, k_TJK, v_TJU))
    return from_slots(attend_blocks(queries, keys, values, plan.blocks, window, sinks_H), plan)


def attend_blocks(
    queries: Tensor, keys: Tensor, values: Tensor, blocks: Sequence[Block], window: Window = None, sinks_H: Sinks = None
) -> Tensor:
    """Attend in each block of slots; returns [slots, H, U]."""
    value_size, has_shared_keys = values.shape[-1], queries.shape[1] != keys.shape[1]
    # Fast kernels need one head size: padded with zeros, long rows take less than half the time.
    values = pad_values(keys, values)
    attended = []
    # Neither slices nor full ranges: the backward pass of each writes a whole tensor of zeros.
    sizes = [block.stop - block.start for block in blocks]
    heads = [x.split(sizes) if len(sizes) > 1 else (x,) for x in (queries, keys, values)]
    for block, *parts in zip(blocks, *heads, strict=True):
        shape = (block.num_rows, block.length)
        q_BHQK, k_BJQK, v_BJQK = (part.unflatten(0, shape).transpose(1, 2) for part in parts)
        if sinks_H is None and (window is None or window >= block.length):
            out = F.scaled_dot_product_attention(q_BHQK, k_BJQK, v_BJQK, is_causal=True, enable_gqa=has_shared_keys)
        else:
            mask_QQ = seen_keys(block.length, window, queries.device)
            out = attend_masked(q_BHQK, k_BJQK, v_BJQK, mask_QQ, None if sinks_H is None else sinks_H[:, None])
        out = out if out.shape[-1] == value_size else out[..., :value_size]
        attended.append(out.transpose(1, 2).flatten(0, 1))
    return attended[0] if len(attended) == 1 else torch.cat(attended)


def seen_keys(length: int, window: Window, device: torch.device) -> Tensor:
    """Return the mask [Q, Q] of the keys that each query of a row sees, true at up to `window` keys."""
    mask_QQ = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return mask_QQ if window is None else mask_QQ.triu(1 - window)


def attend_masked(q_BHQK: Tensor, k_BJSK: Tensor, v_BJSK: Tensor, mask: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Compute `ops.masked_attention` of values as wide as keys; sinks broadcast to [H, Q]."""
    has_shared_keys, head_size = q_BHQK.shape[1] != k_BJSK.shape[1], q_BHQK.shape[-1]
    scale = None
    if sinks is not None:
        # A first key without a value, which all see: two more dims of the queries are its scores, the second the
        # rounding error of the first, and all of the gradient.
        scale = head_size**-0.5
        scaled = (sinks.to(torch.float32) / scale).expand(q_BHQK.shape[:-1])
        rounded = scaled.detach().to(q_BHQK.dtype)
        parts = (q_BHQK, rounded[..., None], (scaled - rounded)[..., None].to(q_BHQK.dtype))
        q_BHQK = torch.cat(parts, dim=-1)
        sink_key = (torch.arange(head_size + 2, device=q_BHQK.device) >= head_size).to(k_BJSK.dtype)
        sink_keys = sink_key.expand(*k_BJSK.shape[:2], 1, -1)
        k_BJSK, v_BJSK = torch.cat((sink_keys, F.pad(k_BJSK, (0, 2))), dim=2), F.pad(v_BJSK, (0, 2, 1, 0))
        mask = F.pad(mask, (1, 0), value=not mask.is_floating_point())
    out = F.scaled_dot_product_attention(
        q_BHQK, k_BJSK, v_BJSK, attn_mask=mask, scale=scale, enable_gqa=has_shared_keys
    )
    return out if sinks is None else out[..., :-2]


def join_sinks(out_THU: Tensor, lse_TH: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and logsumexp with the sinks in the softmax, from those without.

    The backward pass of attention turns the two into the gradients of queries, keys and values.
    """
    sinks_H = sinks_H.to(lse_TH.dtype)
    out_THU = (out_THU * torch.sigmoid(lse_TH - sinks_H)[..., None]).to(out_THU.dtype)
    return out_THU, torch.logaddexp(lse_TH, sinks_H)


def sinks_backward(by_out_THU: Tensor, whole: tuple[Tensor, Tensor], sinks_H: Tensor) -> Tensor:
    """Return the sinks' gradient from output and logsumexp of the whole softmax."""
    out_THU, lse_TH = whole
    weights_TH = torch.exp(sinks_H.to(lse_TH.dtype) - lse_TH)
    means_TH = (by_out_THU * out_THU).sum(-1, dtype=lse_TH.dtype)
    return -(weights_TH * means_TH).sum(0).to(sinks_H.dtype)


def pad_values(keys: Tensor, values: Tensor) -> Tensor:
    """Return the values, padded with zeros to the head size of the keys."""
    missing = keys.shape[-1] - values.shape[-1]
    return F.pad(values, (0, missing)) if missing else values


def nothing_attended(q_THK: Tensor, k_TJK: Tensor, v_TJU: Tensor) -> Tensor:
    """Return the result [0, H, U] without tokens, still differentiable by all three."""
    return q_THK[..., : v_TJU.shape[-1]] + 0.0 * (k_TJK.sum() + v_TJU.sum())
