"""Moves one bucket of update shards into the generation engine's storage: the executors behind the plan.

`exact` sends each rank only what it lacks (all-to-all with uneven splits). `allgather` is the paper's: the bucket's
shards are all-gathered into one temporary buffer, from which each rank selects and copies (MindSpeed RL,
arXiv:2507.19017, Figure 5, steps 1, 2 and 4; step 3, the swap, is elsewhere).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.dataflow.resharding.buckets import Bucket
from spmdrl.dataflow.resharding.plan import Block, ReshardPlan
from spmdrl.dataflow.resharding.slices import SlicedWeights
from spmdrl.types import WeightSlice

Executor = Literal["allgather", "exact"]

# PyTorch 2.13 renames the collective and warns about the old name.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class ReshardConfig:
    """How weights move from the update layout to the generation layout."""

    bucket_bytes: int = 64 << 20
    """temporary device memory for resharding; weights move through it bucket by bucket"""
    executor: Executor = "exact"
    """exact: only the slices that a rank lacks; allgather: the paper's all-gather and select"""
    verify: bool = False
    """compare checksums of generation and update weights at each switch; costs a pass over the weights"""

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ValueError(f"reshard.bucket_bytes is {self.bucket_bytes}, but must be >= 1; 64 MiB is {64 << 20}")
        if self.executor not in get_args(Executor):
            raise ValueError(f"reshard.executor is {self.executor!r}, but must be one of {get_args(Executor)}")


@dataclass(frozen=True)
class _Exchange:
    """One rank's part in one bucket; the outer tuples go by position in the block."""

    copies: tuple[WeightSlice, ...]
    sends: tuple[tuple[WeightSlice, ...], ...]
    receives: tuple[tuple[WeightSlice, ...], ...]
    contributions: tuple[tuple[WeightSlice, ...], ...]
    segment_numel: int

    @property
    def num_sent(self) -> int:
        return _numel(box for boxes in self.sends for box in boxes)

    @property
    def num_received(self) -> int:
        return _numel(box for boxes in self.receives for box in boxes)


class BucketGatherer:
    """Runs the buckets of one rank's block through one reused buffer. Making it is collective over the world."""

    def __init__(self, plan: ReshardPlan, rank: int, *, executor: Executor, dtype: torch.dtype, device: torch.device):
        """`dtype` is that in which weights travel; they are cast to it when sent."""
        self.block = plan.block_of(rank)
        self.group = _open_group(plan, rank)
        self._rank = rank
        self._position = self.block.ranks.index(rank)
        self._executor = executor
        self._dtype = dtype
        self._device = device
        self._exchanges = [_exchange_of(plan, self.block, bucket, rank) for bucket in self.block.buckets]
        self._buffer: Tensor | None = None

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the temporary buffer: the largest need of any bucket on this rank."""
        return max(map(self._buffer_numel, self._exchanges), default=0) * self._dtype.itemsize

    def gather_bucket(self, index: int, held: SlicedWeights, wanted: SlicedWeights) -> int:
        """Fills `wanted` with the bucket's pieces and returns the bytes received. Collective over the block."""
        exchange = self._exchanges[index]
        for box in exchange.copies:
            wanted.view(box).copy_(held.view(box))
        if exchange.segment_numel == 0:
            return 0
        if self._executor == "allgather":
            return self._all_gather(exchange, held, wanted)
        return self._all_to_all(exchange, held, wanted)

    def release(self) -> None:
        """Frees the temporary buffer; the next bucket allocates it anew."""
        if self._buffer is not None:
            self._buffer.untyped_storage().resize_(0)
            self._buffer = None

    def _all_to_all(self, exchange: _Exchange, held: SlicedWeights, wanted: SlicedWeights) -> int:
        buffer = self._reserve()
        sent = buffer[: exchange.num_sent]
        received = buffer[exchange.num_sent : exchange.num_sent + exchange.num_received]
        _pack(sent, (box for boxes in exchange.sends for box in boxes), held)
        dist.all_to_all_single(
            received,
            sent,
            [_numel(boxes) for boxes in exchange.receives],
            [_numel(boxes) for boxes in exchange.sends],
            group=self.group,
        )
        _unpack(received, [box for boxes in exchange.receives for box in boxes], wanted)
        return received.numel() * received.element_size()

    def _all_gather(self, exchange: _Exchange, held: SlicedWeights, wanted: SlicedWeights) -> int:
        numel = exchange.segment_numel
        segments = self._reserve()[: len(self.block.ranks) * numel].view(-1, numel)
        mine = segments[self._position]
        _pack(mine, exchange.contributions[self._position], held)
        _all_gather_flat(segments.view(-1), mine, group=self.group)
        missing = {box for boxes in exchange.receives for box in boxes}
        for segment, boxes in zip(segments, exchange.contributions, strict=True):
            _unpack(segment, boxes, wanted, only=missing)
        return (len(self.block.ranks) - 1) * numel * segments.element_size()

    def _buffer_numel(self, exchange: _Exchange) -> int:
        if self._executor == "allgather":
            return len(self.block.ranks) * exchange.segment_numel
        return exchange.num_sent + exchange.num_received

    def _reserve(self) -> Tensor:
        if self._buffer is None:
            numel = self.buffer_bytes // self._dtype.itemsize
            self._buffer = torch.empty(numel, dtype=self._dtype, device=self._device)
        return self._buffer


def _exchange_of(plan: ReshardPlan, block: Block, bucket: Bucket, rank: int) -> _Exchange:
    """Both ends of a transfer list it in the order of the bucket's pieces, so boxes need no labels on the wire."""
    sends: list[list[WeightSlice]] = [[] for _ in block.ranks]
    receives: list[list[WeightSlice]] = [[] for _ in block.ranks]
    contributions: list[list[WeightSlice]] = [[] for _ in block.ranks]
    for transfer in plan.transfers(bucket):
        if transfer.sender == rank:
            sends[block.ranks.index(transfer.receiver)].append(transfer.box)
        elif transfer.receiver == rank:
            receives[block.ranks.index(transfer.sender)].append(transfer.box)
    for piece in bucket.pieces:
        if piece.is_missing:
            contributions[block.ranks.index(piece.contributor)].append(piece.box)
    copies = [piece.box for piece in bucket.pieces if rank in piece.holders and rank in piece.wanters]
    segment_numel = max(map(_numel, contributions))
    return _Exchange(tuple(copies), _frozen(sends), _frozen(receives), _frozen(contributions), segment_numel)


def _open_group(plan: ReshardPlan, rank: int) -> dist.ProcessGroup | None:
    """The process group of the rank's block; None is the world. Collective over the world."""
    if len(plan.blocks) == 1:
        return None
    groups: dict[range, dist.ProcessGroup] = {b.ranks: dist.new_group(list(b.ranks)) for b in plan.blocks}
    return groups[plan.block_of(rank).ranks]


def _pack(flat: Tensor, boxes: Iterable[WeightSlice], held: SlicedWeights) -> None:
    """Copies boxes side by side into `flat`, cast to its dtype."""
    offset = 0
    for box in boxes:
        flat[offset : offset + box.num_elements].view(box.shape).copy_(held.view(box))
        offset += box.num_elements


def _unpack(
    flat: Tensor, boxes: Sequence[WeightSlice], wanted: SlicedWeights, *, only: set[WeightSlice] | None = None
) -> None:
    """Copies boxes that lie side by side in `flat` to where they are wanted, all or `only` some."""
    offset = 0
    for box in boxes:
        if only is None or box in only:
            wanted.view(box).copy_(flat[offset : offset + box.num_elements].view(box.shape))
        offset += box.num_elements


def _numel(boxes: Iterable[WeightSlice]) -> int:
    return sum(box.num_elements for box in boxes)


def _frozen(lists: list[list[WeightSlice]]) -> tuple[tuple[WeightSlice, ...], ...]:
    return tuple(map(tuple, lists))
