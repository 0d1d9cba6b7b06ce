"""Muon's steps of matrices over any layout (arXiv:2502.16982): orthogonalized moving averages of gradients.

Newton-Schulz iterations need whole matrices. Ranks that hold rows of the same matrices exchange them all-to-all, so
that each gets some of the matrices whole; results return the same way. Every layout so computes the same bits from the
same gradients.

Shape letters: `M` matrices, `O` rows and `I` columns of a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.lora import is_adapter
from spmdrl.engines.parallel.axis_collectives import exchange_rows
from spmdrl.engines.parallel.tensor_parallel import is_first
from spmdrl.engines.parallel.weight_cuts import Parts, chunk_of, is_of_experts, tensor_cut
from spmdrl.nouns.settings.model_config import PROJECTIONS
from spmdrl.resources.mesh import Axis

MOMENTUM = 0.95
"""Decay rate of the moving average of the gradient."""
# Coefficients, number and guard against division by zero of the iterations, as in torch.optim.Muon.
_COEFFICIENTS, _NUM_ITERATIONS, _EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7
# Scales an orthogonal matrix's root mean square to that of AdamW's steps.
_RMS = 0.2


def is_matrix(name: str) -> bool:
    """Return True for a weight that Muon trains: a projection of a layer, or a stack of experts."""
    *_, module, kind = name.split(".")
    is_stack = is_of_experts(name) and kind in PROJECTIONS
    return is_stack or (module in PROJECTIONS and kind == "weight" and not is_adapter(name))


@dataclass(frozen=True)
class MatrixPlace:
    """The part of a matrix, or stack of matrices, that this rank holds."""

    parts: Parts
    """slices of its decoder's weights before FSDP2 shards them"""
    shards: Axis | None
    """axis over which FSDP2 gives each rank rows of every matrix; None if it doesn't"""


class Muon:
    """Moving averages and steps of a rank's matrices."""

    def __init__(
        self, weights: Mapping[str, Tensor], places: Mapping[str, MatrixPlace], config: DecoderConfig, tensor: Axis
    ):
        """`weights` are the local parts."""
        self._places, self._tensor = places, tensor
        self.means = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        # Weights alike in shape and cut are exchanged together. The order is the same on all ranks.
        self._alike: dict[tuple[object, ...], list[str]] = {}
        for name, place in places.items():
            shape = place.parts.shapes[name]
            key = (shape, tensor_cut(config, name, shape), place.shards is None)
            self._alike.setdefault(key, []).append(name)

    @torch.no_grad()
    def step(
        self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], *, lr: float, weight_decay: float
    ) -> None:
        """Change the weights by their gradients. Collective over the ranks that hold parts of the same matrices."""
        for names in self._alike.values():
            shards = self._places[names[0]].shards
            # As many as ranks share them, so that each gets one whole.
            count = 1 if shards is None else shards.size
            for some in (names[start : start + count] for start in range(0, len(names), count)):
                parts = [self._averaged(name, gradients.get(name)) for name in some]
                steps = self._orthogonalized(torch.cat(parts), some[0]).split([len(part) for part in parts])
                size = lr * (_RMS * math.sqrt(max(self._places[some[0]].parts.shapes[some[0]][-2:])))
                for name, step in zip(some, steps, strict=True):
                    weights[name].mul_(1 - lr * weight_decay).add_(step.view_as(weights[name]), alpha=-size)

    def _averaged(self, name: str, gradient: Tensor | None) -> Tensor:
        """Update a weight's moving average, and return what Nesterov's momentum adds up, [M, O, I] of this rank."""
        mean = self.means[name]
        now = torch.zeros_like(mean) if gradient is None else gradient
        mean.lerp_(now, 1 - MOMENTUM)
        ahead = now.lerp(mean, MOMENTUM)
        return ahead if is_of_experts(name) else ahead[None]

    def _orthogonalized(self, local_MOI: Tensor, name: str) -> Tensor:
        """Orthogonalize matrices like `name`, given and returned as this rank holds them."""
        axis, box = self._places[name].shards, self._places[name].parts.slices[name]
        if axis is None:
            return self._held_orthogonalized(local_MOI, name)
        owned, rows = _sizes(len(local_MOI), axis), _sizes(box.shape[-2], axis)
        width = box.shape[-1]
        sent = [number * rows[axis.rank] * width for number in owned]
        received = [owned[axis.rank] * number * width for number in rows]
        arrived = exchange_rows(local_MOI.flatten(), sent, received, axis).split(received)
        parts = [part.view(owned[axis.rank], number, width) for part, number in zip(arrived, rows, strict=True)]
        done = self._held_orthogonalized(torch.cat(parts, dim=1), name).split(rows, dim=1)
        return exchange_rows(torch.cat([part.flatten() for part in done]), received, sent, axis).view(local_MOI.shape)

    def _held_orthogonalized(self, held_MOI: Tensor, name: str) -> Tensor:
        """Orthogonalize matrices of which this rank holds all, or a part on the tensor axis."""
        parts, tensor = self._places[name].parts, self._tensor
        box, shape = parts.slices[name], parts.shapes[name]
        if box.shape[-2:] == shape[-2:] or not len(held_MOI):
            return _each_orthogonalized(held_MOI)
        own = (slice(None), *(slice(start, stop) for start, stop in zip(box.starts[-2:], box.stops[-2:], strict=True)))
        whole_MOI = held_MOI.new_zeros((len(held_MOI), *shape[-2:]))
        if is_first(name, tensor, parts):
            whole_MOI[own] = held_MOI
        return _each_orthogonalized(tensor.sum(whole_MOI))[own]


def _sizes(length: int, axis: Axis) -> list[int]:
    chunks = [chunk_of(length, axis.size, rank) for rank in range(axis.size)]
    return [stop - start for start, stop in chunks]


def _each_orthogonalized(matrices_MOI: Tensor) -> Tensor:
    # One by one, so that the bits don't depend on the number.
    out = torch.empty_like(matrices_MOI)
    for number, matrix in enumerate(matrices_MOI):
        out[number] = orthogonalized(matrix)
    return out


def orthogonalized(matrix_OI: Tensor) -> Tensor:
    """Return about the nearest semi-orthogonal matrix, in bfloat16."""
    linear, cubic, quintic = _COEFFICIENTS
    is_tall = matrix_OI.shape[0] > matrix_OI.shape[1]
    x = matrix_OI.bfloat16()
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=_EPS)
    for _ in range(_NUM_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic), x, beta=linear)
    return x.T if is_tall else x
