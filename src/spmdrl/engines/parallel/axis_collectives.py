"""Collectives along one axis of the update layout, most with a gradient; identities where the axis has one rank.

Each is collective: every rank of the axis must call it, forward and backward, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.resources.mesh import Axis

# PyTorch 2.13 renames the two and warns about the old names.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_rows(x: Tensor, axis: Axis) -> Tensor:
    """All-gather along dim 0, equal sizes. Backward: sum all ranks' gradients of this rank's rows."""
    return x if axis.size == 1 else _GatherRows.apply(x, axis)


def scatter_row_sums(x: Tensor, axis: Axis) -> Tensor:
    """Return this rank's rows of the sum over ranks along dim 0, which the size must divide. Backward: all-gather."""
    if axis.size == 1:
        return x
    assert x.shape[0] % axis.size == 0, (axis.name, axis.size, tuple(x.shape))
    return _ScatterRowSums.apply(x, axis)


def exchange_rows(x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], axis: Axis) -> Tensor:
    """Exchange rows along dim 0 all-to-all with uneven splits, by place on the axis. Backward: the reverse exchange."""
    return x if axis.size == 1 else _ExchangeRows.apply(x, tuple(send_counts), tuple(receive_counts), axis)


def gather_own_gradient(x: Tensor, sizes: Sequence[int], axis: Axis) -> Tensor:
    """Return all parts along dim 0, of these sizes, in axis order. Backward: this rank's part of its own gradient.

    For values from which every rank computes the same loss: summing their gradients would count it repeatedly.
    """
    return x if axis.size == 1 else _GatherOwnGradient.apply(x, tuple(sizes), axis)


def exchange_counts(counts: Tensor, axis: Axis) -> Tensor:
    """Exchange counts: row k of the result is row `this rank` of rank k's `counts` [size, ...]; no gradient."""
    if axis.size == 1:
        return counts.clone()
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts.contiguous(), group=axis.group)
    return received


class RingShift:
    """Tensors in transfer to the next rank of a ring, while others of the same shapes arrive from the previous one."""

    def __init__(self, tensors: Sequence[Tensor], axis: Axis):
        """Start sending; the tensors must not change before `wait`. Collective over the axis."""
        self._sent = [tensor.contiguous() for tensor in tensors]
        self._received = [torch.empty_like(tensor) for tensor in self._sent]
        to, source = axis.ranks[(axis.rank + 1) % axis.size], axis.ranks[axis.rank - 1]
        operations = [dist.P2POp(dist.isend, tensor, to, axis.group) for tensor in self._sent]
        operations += [dist.P2POp(dist.irecv, tensor, source, axis.group) for tensor in self._received]
        self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> list[Tensor]:
        """Return the tensors received from the previous rank."""
        for work in self._works:
            work.wait()
        return self._received


def _gathered(x: Tensor, axis: Axis) -> Tensor:
    out = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
    _all_gather_flat(out, x.contiguous(), group=axis.group)
    return out


def _scattered(x: Tensor, axis: Axis) -> Tensor:
    out = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    _reduce_scatter_flat(out, x.contiguous(), group=axis.group)
    return out


def _exchanged(x: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Tensor:
    out = x.new_empty((sum(receive), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=axis.group)
    return out


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _gathered(x, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _scattered(gradient, ctx.axis), None


class _ScatterRowSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _scattered(x, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradient, ctx.axis), None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, send: tuple[int, ...], receive: tuple[int, ...], axis: Axis) -> Tensor:
        ctx.send, ctx.receive, ctx.axis = send, receive, axis
        return _exchanged(x, send, receive, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradient, ctx.receive, ctx.send, ctx.axis), None, None, None


class _GatherOwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], axis: Axis) -> Tensor:
        start = sum(sizes[: axis.rank])
        ctx.own = slice(start, start + sizes[axis.rank])
        longest = max(sizes)
        # gloo gathers equal sizes only: pad to the longest.
        padded = x.new_zeros((longest, *x.shape[1:]))
        padded[: x.shape[0]] = x
        parts = _gathered(padded, axis).unflatten(0, (axis.size, longest))
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient[ctx.own], None, None
