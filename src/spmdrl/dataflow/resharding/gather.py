"""Executors of the plan: move a bucket of update shards into the generation engine's storage.

`exact` sends each rank only what it lacks: from storage to storage if pieces are contiguous and in the wire's dtype,
otherwise through a temporary buffer. `allgather` is the paper's: the bucket's shards are all-gathered into the buffer,
from which each rank selects and copies (MindSpeed RL, arXiv:2507.19017, Figure 5, steps 1, 2 and 4; step 3, the swap,
is elsewhere).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.dataflow.resharding.planning.buckets import Piece, Transfer
from spmdrl.dataflow.resharding.planning.cells import SlicedWeights
from spmdrl.dataflow.resharding.planning.plan import Block, ReshardPlan
from spmdrl.nouns.batch import WeightSlice
from spmdrl.nouns.settings.flow_config import Executor
from spmdrl.resources.collectives import wait_like_the_job
from spmdrl.runtime.network.sockets import closing_new_listeners

# PyTorch 2.13 renames the collective and warns about the old name.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Received:
    """Bytes that a rank received from others."""

    same_node: int = 0
    cross_node: int = 0

    @property
    def total(self) -> int:
        return self.same_node + self.cross_node

    def __add__(self, other: Received) -> Received:
        return Received(self.same_node + other.same_node, self.cross_node + other.cross_node)


@dataclass(frozen=True)
class _Exchange:
    """One rank's share of a bucket's pieces with one wire dtype."""

    dtype: torch.dtype
    copies: tuple[WeightSlice, ...]
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    contributions: tuple[tuple[WeightSlice, ...], ...]
    """boxes by position in the block"""
    segment_numel: int
    """elements contributed by the busiest rank"""

    @cached_property
    def transfer_numel(self) -> int:
        """Number of elements that the rank sends, each piece once, and receives."""
        sent = _numel({transfer.box for transfer in self.sends})
        return sent + _numel(transfer.box for transfer in self.receives)


class BucketGatherer:
    """Transfer of a block's buckets through one reused buffer. Construction is collective over the world.

    Dtypes take turns in the buffer, so that all pieces are aligned without gaps.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        *,
        executor: Executor,
        dtypes: Mapping[str, torch.dtype],
        device: torch.device,
    ):
        """`dtypes` are the wire dtypes, to which weights are cast when sent."""
        self.block = plan.block_of(rank)
        self.group = _open_group(plan, rank)
        self._rank = rank
        self._ranks_per_node = plan.ranks_per_node
        self._position = self.block.ranks.index(rank)
        self._executor = executor
        self._device = device
        self._exchanges = [
            [
                _exchange_of(plan, self.block, rank, dtype, pieces)
                for dtype, pieces in _by_dtype(bucket.pieces, dtypes).items()
            ]
            for bucket in self.block.buckets
        ]
        self._buffer: Tensor | None = None
        if len(self.block.ranks) > 1:
            # Back ends that connect in a group's first call need all its ranks there; a bucket may leave some out.
            dist.all_reduce(torch.zeros(1, device=device), group=self.group)

    @cached_property
    def buffer_bytes(self) -> int:
        """Bytes of the temporary buffer: the largest need of any bucket on this rank, if every piece needs it."""
        return max(map(self._bytes_of, itertools.chain.from_iterable(self._exchanges)), default=0)

    def gather_bucket(self, index: int, held: SlicedWeights, wanted: SlicedWeights) -> Received:
        """Fill `wanted` with the bucket's pieces, and return the bytes from others. Collective over the block."""
        return sum((self._run(exchange, held, wanted) for exchange in self._exchanges[index]), Received())

    def release(self) -> None:
        """Free the temporary buffer; the next bucket allocates it anew."""
        if self._buffer is not None:
            self._buffer.untyped_storage().resize_(0)
            self._buffer = None

    def _run(self, exchange: _Exchange, held: SlicedWeights, wanted: SlicedWeights) -> Received:
        for box in exchange.copies:
            source, place = held.view(box), wanted.view(box)
            # Lent pieces are already there.
            if source.data_ptr() != place.data_ptr():
                place.copy_(source)
        if exchange.segment_numel == 0:
            return Received()
        if self._executor == "allgather":
            return self._all_gather(exchange, held, wanted)
        return self._send_and_receive(exchange, held, wanted)

    def _send_and_receive(self, exchange: _Exchange, held: SlicedWeights, wanted: SlicedWeights) -> Received:
        slots = _Slots(exchange.dtype, lambda: self._reserve(exchange))
        arriving = [(transfer, wanted.view(transfer.box)) for transfer in exchange.receives]
        messages = [(transfer, place, slots.beside(place)) for transfer, place in arriving]
        # A piece is packed once for all its receivers.
        boxes = {transfer.box for transfer in exchange.sends}
        leaving = {box: slots.filled_with(held.view(box)) for box in boxes}
        operations = [dist.P2POp(dist.irecv, message, t.sender, self.group) for t, _, message in messages]
        operations += [dist.P2POp(dist.isend, leaving[t.box], t.receiver, self.group) for t in exchange.sends]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        for _, place, message in messages:
            if message is not place:
                place.copy_(message)
        return self._received([(transfer.sender, message.nbytes) for transfer, _, message in messages])

    def _all_gather(self, exchange: _Exchange, held: SlicedWeights, wanted: SlicedWeights) -> Received:
        numel = exchange.segment_numel
        segments = self._reserve(exchange).view(-1, numel)
        mine = segments[self._position]
        _pack(mine, exchange.contributions[self._position], held)
        _all_gather_flat(segments.view(-1), mine, group=self.group)
        missing = {transfer.box for transfer in exchange.receives}
        for segment, boxes in zip(segments, exchange.contributions, strict=True):
            _unpack(segment, boxes, wanted, only=missing)
        return self._received([(rank, mine.nbytes) for rank in self.block.ranks if rank != self._rank])

    def _received(self, parts: Iterable[tuple[int, int]]) -> Received:
        """Return the sum of (sender, bytes) by link."""
        parts, node = list(parts), self._rank // self._ranks_per_node
        same = sum(num_bytes for sender, num_bytes in parts if sender // self._ranks_per_node == node)
        return Received(same, sum(num_bytes for _, num_bytes in parts) - same)

    def _bytes_of(self, exchange: _Exchange) -> int:
        if self._executor == "allgather":
            return len(self.block.ranks) * exchange.segment_numel * exchange.dtype.itemsize
        return exchange.transfer_numel * exchange.dtype.itemsize

    def _reserve(self, exchange: _Exchange) -> Tensor:
        """Return the part of the buffer that an exchange needs, in its dtype."""
        if self._buffer is None:
            self._buffer = torch.empty(self.buffer_bytes, dtype=torch.uint8, device=self._device)
        return self._buffer[: self._bytes_of(exchange)].view(exchange.dtype)


class _Slots:
    """Parts of the buffer, side by side, for the pieces of one exchange that can't travel from storage to storage."""

    def __init__(self, dtype: torch.dtype, reserve: Callable[[], Tensor]):
        self._dtype = dtype
        self._reserve = reserve
        self._used = 0

    def beside(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself if it can be sent as is, otherwise a part of the buffer of its shape."""
        if tensor.dtype == self._dtype and tensor.is_contiguous():
            return tensor
        start, self._used = self._used, self._used + tensor.numel()
        return self._reserve()[start : self._used].view(tensor.shape)

    def filled_with(self, tensor: Tensor) -> Tensor:
        """Return the tensor to send in this one's place."""
        slot = self.beside(tensor)
        return tensor if slot is tensor else slot.copy_(tensor)


def _by_dtype(pieces: Iterable[Piece], dtypes: Mapping[str, torch.dtype]) -> dict[torch.dtype, list[Piece]]:
    """Group pieces by wire dtype, in an order that all ranks share."""
    groups: dict[torch.dtype, list[Piece]] = {}
    for piece in pieces:
        groups.setdefault(dtypes[piece.box.name], []).append(piece)
    return groups


def _exchange_of(plan: ReshardPlan, block: Block, rank: int, dtype: torch.dtype, pieces: Sequence[Piece]) -> _Exchange:
    """Build a rank's exchange; both ends list transfers in the order of pieces, so boxes need no labels."""
    transfers = [transfer for piece in pieces for transfer in piece.transfers(plan.ranks_per_node)]
    contributions: list[list[WeightSlice]] = [[] for _ in block.ranks]
    for piece in pieces:
        if piece.is_missing:
            contributions[block.ranks.index(piece.contributor)].append(piece.box)
    return _Exchange(
        dtype,
        copies=tuple(piece.box for piece in pieces if rank in piece.holders and rank in piece.wanters),
        sends=tuple(transfer for transfer in transfers if transfer.sender == rank),
        receives=tuple(transfer for transfer in transfers if transfer.receiver == rank),
        contributions=tuple(map(tuple, contributions)),
        segment_numel=max(map(_numel, contributions)),
    )


def _open_group(plan: ReshardPlan, rank: int) -> dist.ProcessGroup | None:
    """Return the process group of the rank's block; None is the world. Collective over the world."""
    if len(plan.blocks) == 1:
        return None
    with closing_new_listeners():
        groups: dict[range, dist.ProcessGroup] = {b.ranks: dist.new_group(list(b.ranks)) for b in plan.blocks}
    own = groups[plan.block_of(rank).ranks]
    wait_like_the_job(own)
    return own


def _pack(flat: Tensor, boxes: Iterable[WeightSlice], held: SlicedWeights) -> None:
    """Copy boxes side by side into `flat`, cast to its dtype."""
    offset = 0
    for box in boxes:
        flat[offset : offset + box.num_elements].view(box.shape).copy_(held.view(box))
        offset += box.num_elements


def _unpack(
    flat: Tensor, boxes: Sequence[WeightSlice], wanted: SlicedWeights, *, only: set[WeightSlice] | None = None
) -> None:
    """Copy boxes that lie side by side in `flat` to their targets, all or `only` some."""
    offset = 0
    for box in boxes:
        if only is None or box in only:
            wanted.view(box).copy_(flat[offset : offset + box.num_elements].view(box.shape))
        offset += box.num_elements


def _numel(boxes: Iterable[WeightSlice]) -> int:
    return sum(box.num_elements for box in boxes)
