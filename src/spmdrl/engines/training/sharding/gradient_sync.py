"""Adds up, over the tensor axis, the gradients of weights that several of its ranks hold.

Each rank's gradient of such a weight covers its own heads, columns or tokens; the whole one is their sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from spmdrl.engines.parallel.parts import Parts
from spmdrl.resources.mesh import Axis

SUM_BYTES = 64 << 20
"""Gradients that travel in one sum, unless one alone is larger."""


def is_first(name: str, axis: Axis, parts: Parts) -> bool:
    """Whether this rank is the first on the tensor axis that holds its slice of a weight."""
    copies = parts.tensor_copies[name]
    return axis.rank == copies.index * (axis.size // copies.distinct)


def sum_tensor_gradients(
    gradients: Mapping[str, Tensor], parts: Parts, axis: Axis, *, sum_bytes: int = SUM_BYTES
) -> None:
    """Replace, in place, each gradient by the sum over the ranks that hold the same slice. Collective over the axis.

    Takes what this rank stores of each gradient; ranks of the axis store equally much, under the same names, in the
    same order.
    """
    shared = {name: gradient for name, gradient in gradients.items() if parts.tensor_copies[name].distinct < axis.size}
    for bucket in _buckets(shared, parts, sum_bytes):
        _sum_bucket(bucket, parts, axis)


def _buckets(gradients: Mapping[str, Tensor], parts: Parts, sum_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Runs of gradients of one dtype that take at most `sum_bytes` on the way, or of one that takes more."""
    bucket: dict[str, Tensor] = {}
    num_bytes = 0
    dtype = None
    for name, gradient in gradients.items():
        needed = gradient.nbytes * parts.tensor_copies[name].distinct
        if bucket and (num_bytes + needed > sum_bytes or gradient.dtype != dtype):
            yield bucket
            bucket, num_bytes = {}, 0
        bucket[name] = gradient
        num_bytes, dtype = num_bytes + needed, gradient.dtype
    if bucket:
        yield bucket


def _sum_bucket(bucket: Mapping[str, Tensor], parts: Parts, axis: Axis) -> None:
    """Sum the gradients of one bucket, each with a place for every different slice of its weight."""
    spread = []
    for name, gradient in bucket.items():
        copies = parts.tensor_copies[name]
        places = gradient.new_zeros(copies.distinct, gradient.numel())
        places[copies.index] = gradient.flatten()
        spread.append(places.flatten())
    summed = axis.sum(torch.cat(spread)).split([places.numel() for places in spread])
    for (name, gradient), total in zip(bucket.items(), summed, strict=True):
        copies = parts.tensor_copies[name]
        gradient.copy_(total.view(copies.distinct, -1)[copies.index].view_as(gradient))
