"""The few collectives that stages and engines need, by purpose; each does nothing in a group of one rank.

All but the reductions take host tensors: they carry counts, lengths and metadata, not weights. A reduction of a
device's tensor travels by the links between devices.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None


def group_size(group: Group = None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def sum_over(tensor: Tensor, group: Group = None) -> Tensor:
    """The elementwise sum over the group's ranks. Collective."""
    return _reduced(tensor, dist.ReduceOp.SUM, group)


def max_over(tensor: Tensor, group: Group = None) -> Tensor:
    """The elementwise maximum over the group's ranks. Collective."""
    return _reduced(tensor, dist.ReduceOp.MAX, group)


def _reduced(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: Group) -> Tensor:
    out = tensor.clone()
    if group_size(group) > 1:
        dist.all_reduce(out, op=op, group=group)
    return out


def gather_ragged(values: Tensor, group: Group = None) -> list[Tensor]:
    """Every rank's 1-D tensor, in rank order; lengths may differ. Collective."""
    size = group_size(group)
    if size == 1:
        return [values.clone()]
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(counts, torch.tensor([values.numel()]), group=group)
    lengths = [int(count) for count in counts]
    # gloo gathers equal sizes only: pad to the longest.
    padded = values.new_zeros(max(lengths))
    padded[: values.numel()] = values
    gathered = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(gathered, padded, group=group)
    return [part[:length] for part, length in zip(gathered, lengths, strict=True)]


def gather_bytes(payload: bytes, group: Group = None) -> list[bytes]:
    """Every rank's bytes, in rank order. Collective."""
    return [part.numpy().tobytes() for part in gather_ragged(_as_tensor(payload), group)]


def broadcast_ragged(
    values: Tensor | None, src: int = 0, group: Group = None, device: torch.device | None = None
) -> Tensor:
    """The bytes (1-D uint8, on the host) of global rank `src`, on every rank of the group. Collective.

    They travel through `device`, so by the links between accelerators where it is one.
    """
    if group_size(group) == 1:
        assert values is not None, "the source rank must bring the bytes"
        return values
    own = values if dist.get_rank() == src else None
    size = torch.tensor([-1 if own is None else own.numel()])
    dist.broadcast(size, src, group=group)
    assert size >= 0, "the source rank must bring the bytes"
    content = torch.empty(int(size), dtype=torch.uint8, device=device) if own is None else own.to(device)
    if int(size):
        dist.broadcast(content, src, group=group)
    return content.cpu()


def broadcast_bytes(payload: bytes | None, src: int = 0, group: Group = None) -> bytes:
    """The bytes of global rank `src`, on every rank of the group. Collective."""
    return broadcast_ragged(None if payload is None else _as_tensor(payload), src, group).numpy().tobytes()


def _as_tensor(payload: bytes) -> Tensor:
    # frombuffer refuses an empty buffer.
    return torch.frombuffer(bytearray(payload) or bytearray(1), dtype=torch.uint8)[: len(payload)]


def barrier(group: Group = None) -> None:
    """Wait for every rank of the group. Collective.

    A reduction of one host number rather than `dist.barrier`, which on accelerators occupies the device.
    """
    if group_size(group) > 1:
        dist.all_reduce(torch.zeros(1), group=group)
