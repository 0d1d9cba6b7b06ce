"""The few collectives of stages and engines, by purpose; each does nothing in a group of one rank.

All but the reductions take host tensors: they carry counts, lengths and metadata, not weights. A reduction of a
device's tensor uses the links between devices.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.runtime.network.sockets import closing_new_listeners
from spmdrl.runtime.supervision.stop_request import stop_reason

Group = dist.ProcessGroup | None
"""Ranks of a collective; None: those of `among`, or else all."""

_PAUSE_SECONDS = 0.001
# Ranks arrive long before the last one does: waiting has a deadline of its own.
_NO_TIMEOUT = timedelta(days=7)
_WORD = 8
_SHORT_ROUND_BYTES = 16384
"""limit on all ranks' short payloads together, at which a round takes as long as for a byte"""


_present: Group = None


@contextmanager
def among(group: Group) -> Iterator[None]:
    """Let collectives that name no group be this one's inside the block, which other ranks needn't enter."""
    global _present
    before, _present = _present, group
    try:
        yield
    finally:
        _present = before


def group_size(group: Group = None) -> int:
    return dist.get_world_size(group or _present) if dist.is_initialized() else 1


@closing_new_listeners()
def new_group(ranks: Sequence[int]) -> Group:
    """Return a process group of these ranks, None on the others. Collective over all ranks."""
    group = dist.new_group(list(ranks))
    if dist.get_rank() not in ranks:
        return None
    wait_like_the_job(group)
    return group


def wait_like_the_job(group: dist.ProcessGroup) -> None:
    """Set a group's timeout to that of the job's own; PyTorch's defaults are 10 (NCCL) or 30 minutes."""
    job = dist.group.WORLD
    assert job is not None, "groups are made after the job's own"
    for device in group._device_types:
        backend = group._get_backend(device)
        if group is not job and hasattr(backend, "_set_default_timeout"):
            backend._set_default_timeout(job._get_backend(device).options._timeout)


def sum_over(tensor: Tensor, group: Group = None) -> Tensor:
    """Return the elementwise sum over the group's ranks. Collective."""
    return _reduced(tensor, dist.ReduceOp.SUM, group)


def sum_into(tensor: Tensor, group: Group = None) -> None:
    """Replace a tensor by `sum_over` of it. Collective."""
    if group_size(group) > 1:
        dist.all_reduce(tensor, group=group or _present)


def max_over(tensor: Tensor, group: Group = None) -> Tensor:
    """Return the elementwise maximum over the group's ranks. Collective."""
    return _reduced(tensor, dist.ReduceOp.MAX, group)


def _reduced(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: Group) -> Tensor:
    out = tensor.clone()
    if group_size(group) > 1:
        dist.all_reduce(out, op=op, group=group or _present)
    return out


def gather_ragged(values: Tensor, group: Group = None) -> list[Tensor]:
    """Return every rank's 1-D tensor, in rank order; lengths may differ. Collective."""
    return [part for (part,) in gather_ragged_columns([values], group)]


def gather_ragged_columns(columns: Sequence[Tensor], group: Group = None) -> list[list[Tensor]]:
    """Return every rank's 1-D tensors, in rank order, by one exchange; lengths may differ, dtypes don't. Collective."""
    size = group_size(group)
    if size == 1:
        return [[values.clone() for values in columns]]
    counts = [torch.zeros(len(columns), dtype=torch.int64) for _ in range(size)]
    dist.all_gather(counts, torch.tensor([values.numel() for values in columns]), group=group or _present)
    widths = [values.element_size() for values in columns]
    bounds = [[0, *accumulate(n * width for n, width in zip(each.tolist(), widths, strict=True))] for each in counts]
    # gloo gathers equal sizes only: pad to the longest.
    padded = torch.zeros(max(ends[-1] for ends in bounds), dtype=torch.uint8)
    own = [values.contiguous().view(torch.uint8) for values in columns]
    torch.cat(own, out=padded[: sum(map(len, own))])
    gathered = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(gathered, padded, group=group or _present)
    return [
        # Copies begin at the alignment of any dtype.
        [part[slice(*ends)].clone().view(values.dtype) for values, ends in zip(columns, pairwise(each), strict=True)]
        for part, each in zip(gathered, bounds, strict=True)
    ]


def gather_bytes(payload: bytes, group: Group = None) -> list[bytes]:
    """Return every rank's bytes, in rank order. Collective.

    Short payloads are sent with their lengths, in one round instead of two.
    """
    size = group_size(group)
    if size == 1:
        return [payload]
    short_bytes = max(_SHORT_ROUND_BYTES // size, _WORD)
    head = len(payload).to_bytes(_WORD, "little") + payload[:short_bytes]
    heads = _gather_padded(head, _WORD + short_bytes, size, group)
    lengths = [int.from_bytes(part[:_WORD], "little") for part in heads]
    if max(lengths) <= short_bytes:
        return [part[_WORD : _WORD + length] for part, length in zip(heads, lengths, strict=True)]
    parts = _gather_padded(payload, max(lengths), size, group)
    return [part[:length] for part, length in zip(parts, lengths, strict=True)]


def gather_and_agree(payload: bytes) -> tuple[list[bytes], str | None]:
    """Return every rank's bytes, in rank order, and any rank's reason to stop. Collective over all ranks.

    All ranks get the same result, so either all stop here or none.
    """
    own = stop_reason() or ""
    parts = [part.partition(b"\n") for part in gather_bytes(own.encode() + b"\n" + payload)]
    reasons = [reason.decode() for reason, _, _ in parts if reason]
    return [content for _, _, content in parts], reasons[0] if reasons else None


def _gather_padded(payload: bytes, width: int, size: int, group: Group) -> list[bytes]:
    """Gather `width` bytes of each of `size` ranks, whose payloads are padded with zeros. Collective."""
    padded = _as_tensor(payload.ljust(width, b"\0"))
    gathered = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(gathered, padded, group=group or _present)
    return [part.numpy().tobytes() for part in gathered]


def broadcast_ragged(
    values: Tensor | None, src: int | None = None, group: Group = None, device: torch.device | None = None
) -> Tensor:
    """Return the bytes (1-D uint8, on the host) of global rank `src`, on every rank of the group. Collective.

    Without `src` they are those of the group's first rank. They go through `device`, so by the links between
    accelerators if it is one.
    """
    if group_size(group) == 1:
        assert values is not None, "the source rank must pass the bytes"
        return values
    group = group or _present
    if src is None:
        src = 0 if group is None else dist.get_global_rank(group, 0)
    own = values if dist.get_rank() == src else None
    size = torch.tensor([-1 if own is None else own.numel()])
    dist.broadcast(size, src, group=group)
    assert size >= 0, "the source rank must pass the bytes"
    content = torch.empty(int(size), dtype=torch.uint8, device=device) if own is None else own.to(device)
    if int(size):
        dist.broadcast(content, src, group=group)
    return content.cpu()


def broadcast_bytes(payload: bytes | None, src: int | None = None, group: Group = None) -> bytes:
    """Return the bytes of global rank `src`, or the group's first, on every rank of the group. Collective."""
    return broadcast_ragged(None if payload is None else _as_tensor(payload), src, group).numpy().tobytes()


def _as_tensor(payload: bytes) -> Tensor:
    # frombuffer refuses an empty buffer.
    return torch.frombuffer(bytearray(payload) or bytearray(1), dtype=torch.uint8)[: len(payload)]


def barrier(group: Group = None) -> None:
    """Wait for every rank of the group. Collective.

    Reduces one host number, since `dist.barrier` occupies the device on accelerators.
    """
    if group_size(group) > 1:
        dist.all_reduce(torch.zeros(1), group=group or _present)


class Arrivals:
    """Rounds in which ranks arrive without waiting for the others: absent -> arrived -> complete -> absent."""

    def __init__(self, timeout_seconds: float):
        """Make a group of its own, beside the ranks' other collectives. Collective over all ranks.

        `timeout_seconds` limits `wait`.
        """
        self._timeout_seconds = timeout_seconds
        self._group: Group = None
        if group_size() > 1:
            with closing_new_listeners():
                self._group = dist.new_group(backend="gloo", timeout=_NO_TIMEOUT)
        self._token = torch.zeros(1)
        self._work: dist.Work | None = None
        self.has_arrived = False

    def arrive(self) -> None:
        """Arrive at this round, once; doesn't wait."""
        if self.has_arrived:
            return
        self.has_arrived = True
        if self._group is not None:
            self._work = dist.all_reduce(self._token, group=self._group, async_op=True)

    @property
    def are_complete(self) -> bool:
        """Return True if this rank knows that all ranks have arrived at this round."""
        return self.has_arrived and (self._work is None or self._work.is_completed())

    def next_round(self) -> None:
        """Begin another round after one that is complete on some rank; raises the error of a lost connection."""
        if self._work is not None:
            self._work.wait()
        self._work, self.has_arrived = None, False

    def wait(self) -> None:
        """Wait until all ranks have arrived. Raises TimeoutError if some haven't in time."""
        deadline = time.monotonic() + self._timeout_seconds
        while not self.are_complete:
            if time.monotonic() > deadline:
                raise TimeoutError(f"some ranks still generate {self._timeout_seconds:g} s after this one ended")
            time.sleep(_PAUSE_SECONDS)
