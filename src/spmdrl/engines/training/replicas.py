"""Whole copies of a model on a CPU's ranks, each of which has rows of its own: one sum of gradients per update.

FSDP2 would copy the weights in each pass and reduce after each micro-batch. Where the cores that compute also carry the
messages, nothing of that hides behind anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from spmdrl.resources.collectives import sum_into
from spmdrl.resources.mesh import Axis, UpdateMesh

JOINED_BYTES = 4 << 20
"""Gradients that are smaller travel together, in messages of about this size."""


def holds_replicas(mesh: UpdateMesh, device: torch.device, *, parameters: torch.dtype, compute: torch.dtype) -> bool:
    """Whether ranks hold whole plain copies: data is the only axis, and layers compute in the weights' float32."""
    is_whole = mesh.dense_shards.size() == mesh.layout.data and mesh.model.size == 1 and mesh.expert.size == 1
    return device.type == "cpu" and mesh.layout.data > 1 and is_whole and parameters == compute == torch.float32


def sum_gradients(parameters: Sequence[nn.Parameter], axis: Axis) -> None:
    """Replace each gradient by its sum over the replicas. Collective over the axis.

    A rank that has no gradient where another has one, as its memory ran out, takes part with zeros.
    """
    has_gradient = torch.tensor([one.grad is not None for one in parameters], dtype=torch.int32)
    some_have = axis.max(has_gradient).tolist()
    for parameter in (one for one, some in zip(parameters, some_have, strict=True) if some and one.grad is None):
        parameter.grad = torch.zeros_like(parameter)
    gradients = [one.grad for one in parameters if one.grad is not None]
    for gradient in (one for one in gradients if one.nbytes >= JOINED_BYTES):
        _sum_one(gradient, axis)
    for together in _joined([one for one in gradients if one.nbytes < JOINED_BYTES]):
        flat = torch.cat([gradient.flatten() for gradient in together])
        sum_into(flat, axis.group)
        for gradient, total in zip(together, flat.split([one.numel() for one in together]), strict=True):
            gradient.copy_(total.view_as(gradient))


def _sum_one(gradient: Tensor, axis: Axis) -> None:
    if gradient.is_contiguous():
        return sum_into(gradient, axis.group)
    gradient.copy_(axis.sum(gradient.contiguous()))


def _joined(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of gradients of about JOINED_BYTES."""
    run: list[Tensor] = []
    for gradient in gradients:
        run.append(gradient)
        if sum(one.nbytes for one in run) >= JOINED_BYTES:
            yield run
            run = []
    if run:
        yield run
