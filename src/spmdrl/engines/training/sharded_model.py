"""One rank's part of a model for training: its stages, and the slice of a weight that each tensor holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as TorchShard

from spmdrl.engines.models.decoder import Decoder, DecoderConfig
from spmdrl.engines.models.hf.model_folder import buffer_dtypes, parameter_shapes
from spmdrl.engines.models.lora import adapted_linears, is_adapter
from spmdrl.engines.parallel.tensor_parallel import is_first
from spmdrl.engines.parallel.weight_cuts import Parts, chunk_of
from spmdrl.nouns.batch import WeightSlice, whole_slice
from spmdrl.resources.collectives import group_size, sum_into
from spmdrl.resources.mesh import Axis, UpdateMesh

_EMBEDDING = "model.embed_tokens.weight"
# In float32 64 MiB: smaller reductions are bound by latency.
_BUCKET_NUMEL = 16 << 20
JOINED_BYTES = 4 << 20
"""Smaller gradients are joined in messages of about this size."""


@dataclass(frozen=True)
class Shard:
    """A rank's part of one named tensor; it may be empty."""

    tensor: Tensor
    """The local storage itself, not a copy."""
    slice: WeightSlice
    """Box of the whole tensor."""
    global_shape: tuple[int, ...]
    is_first: bool = True
    """True unless another rank counts as holder of these elements: over all ranks, first shards tile the tensor."""


class ShardedModel:
    """The decoder stages of one rank, cut and sharded by the layout, under the names of the whole model."""

    def __init__(
        self,
        config: DecoderConfig,
        stages: dict[int, Decoder],
        parts: dict[int, Parts],
        mesh: UpdateMesh,
        *,
        is_replica: bool = False,
        reduces_once: bool = False,
    ):
        """`is_replica`: ranks of the data axis hold whole copies, whose gradients must be summed after each pass.

        `reduces_once`: FSDP2's gathered weights and gradients stay until the end of a pass.
        """
        self.config = config
        self.is_replica = is_replica
        self._reduces_once = reduces_once
        self.stages = stages
        """Stages by number; with one pipeline rank and one chunk, the whole decoder is stage 0."""
        self.mesh = mesh
        self.parts = parts
        """Parts of each stage before FSDP2 shards it."""
        self.part_of = {name: held for held in parts.values() for name in held.slices}
        """the same by weight"""
        self._buffers = {name for decoder in stages.values() for name, _ in decoder.named_buffers()}
        self._fsdp_modules = [m for decoder in stages.values() for m in decoder.modules() if isinstance(m, FSDPModule)]
        # The stage with the embedding counts as the holder of a tied head; one with the head alone has a copy.
        spans = [decoder.span for decoder in stages.values() if decoder.config.tied_head]
        self._copies = {_EMBEDDING} if any(span.heads and not span.embeds for span in spans) else set()

    @property
    def decoders(self) -> list[Decoder]:
        return list(self.stages.values())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the current parameters: FSDP2 replaces gathered ones."""
        for decoder in self.decoders:
            yield from decoder.named_parameters()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters, then the buffers that belong to the weights."""
        yield from self.named_parameters()
        for decoder in self.decoders:
            yield from decoder.named_buffers()

    def named_shards(self) -> dict[str, Shard]:
        return {name: self.shard_of(name, weight) for name, weight in self.named_weights()}

    @torch.no_grad()
    def merged_shards(self) -> dict[str, Shard]:
        """Return the shards of the model's own weights, with adapters added in float32.

        Collective over the ranks that share a weight's shards.
        """
        shards = {name: shard for name, shard in self.named_shards().items() if not is_adapter(name)}
        for decoder in self.decoders:
            for path, linear in adapted_linears(decoder):
                shard, up = shards[f"{path}.weight"], linear.lora_A.weight
                whole_up = up.full_tensor() if isinstance(up, DTensor) else up
                # Cut along its outputs like the projection.
                down = local_tensor(linear.lora_B.weight)
                merged = shard.tensor.float() + linear.scale * (down.float() @ whole_up.float())
                shards[f"{path}.weight"] = replace(shard, tensor=merged)
        return shards

    def named_gradients(self) -> dict[str, Shard]:
        """Return the existing gradients, cut like the weights."""
        return {
            name: self.shard_of(name, parameter.grad)
            for name, parameter in self.named_parameters()
            if parameter.grad is not None
        }

    def shard_of(self, name: str, tensor: Tensor) -> Shard:
        """Return this rank's part of a weight, or of a gradient or mean that is cut like it."""
        parts = self.part_of[name]
        box, first = parts.slices[name], name not in self._copies
        if self.mesh.tensor.size > 1:
            first = first and is_first(name, self.mesh.tensor, parts)
        if isinstance(tensor, DTensor):
            for axis, placement in enumerate(tensor.placements):
                size, rank = tensor.device_mesh.size(axis), tensor.device_mesh.get_local_rank(axis)
                if isinstance(placement, TorchShard):
                    box = box.narrowed(placement.dim, *chunk_of(box.shape[placement.dim], size, rank))
                else:
                    first = first and rank == 0
        elif self.is_replica or name in self._buffers:
            first = first and self.mesh.data.rank == 0 and self.mesh.context.rank == 0
        local = local_tensor(tensor)
        assert local.shape == box.shape, (name, tuple(local.shape), box)
        return Shard(local, box, parts.shapes[name], first)

    def gather_whole(
        self, shards: Mapping[str, Shard], dtype: torch.dtype, *, wanted: Callable[[str], bool] = lambda name: True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor whole, valid until the next one. Collective over all ranks: each must take all of them.

        The shards are weights, or gradients under the weights' names, restricted to `wanted`; a missing shard counts as
        0. Buffers keep their own dtype.
        """
        kept = buffer_dtypes(self.config)
        shapes = {name: shape for name, shape in parameter_shapes(self.config).items() if wanted(name)}
        for bucket in _buckets(shapes):
            for name, whole in self._sum_bits(shards, {name: shapes[name] for name in bucket}):
                yield name, whole.to(kept.get(name, dtype))

    def _sum_bits(
        self, shards: Mapping[str, Shard], shapes: Mapping[str, tuple[int, ...]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors whole, in float32, by one reduction. Collective over all ranks.

        Sums of bits with zeros keep every bit; sums of numbers would lose the sign of -0.
        """
        device = next(iter(self.named_weights()))[1].device
        if group_size() == 1:
            for name, shape in shapes.items():
                held = shards.get(name)
                yield name, torch.zeros(shape, device=device) if held is None else held.tensor.detach().float()
            return
        sizes = [math.prod(shape) for shape in shapes.values()]
        bits = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        for (name, shape), part in zip(shapes.items(), bits.split(sizes), strict=True):
            shard = shards.get(name)
            if shard is not None and shard.is_first and shard.slice.num_elements:
                part.view(shape)[shard.slice.index_within(whole_slice(name, shape))] = (
                    shard.tensor.detach().to(torch.float32).view(torch.int32)
                )
        sum_into(bits)
        for (name, shape), whole in zip(shapes.items(), bits.view(torch.float32).split(sizes), strict=True):
            yield name, whole.view(shape)

    def tied_gradients(self) -> list[Tensor]:
        """Return this rank's storage of a tied weight's gradients: the embedding's, or the head's copy of it.

        Empty if it is frozen, on all ranks.
        """
        held = [decoder.model.embed_tokens for decoder in self.decoders]
        return [local_tensor(one.weight.grad) for one in held if one is not None and one.weight.grad is not None]

    @property
    def is_plain(self) -> bool:
        """True if ranks don't communicate inside a pass: neither FSDP2, which is stateful, nor an axis does."""
        return not self._fsdp_modules and self.mesh.model.size == 1 and self.mesh.expert.size == 1

    @property
    def forwards_alone(self) -> bool:
        """True if ranks communicate only before the first layer and after backward: any may do another forward pass.

        With several units, FSDP2 skips the reduction of the one whose forward was interrupted.
        """
        return self.mesh.model.size == 1 and self.mesh.expert.size == 1 and len(self._fsdp_modules) <= 1

    def begin_microbatch(self, *, is_last: bool) -> None:
        """If gradients are reduced once, keep them on this rank until the last micro-batch of a pass."""
        for module in self._fsdp_modules if self._reduces_once else ():
            module.set_requires_gradient_sync(is_last)

    def reshard(self) -> None:
        """Free all device memory of weights except this rank's shards."""
        for module in self._fsdp_modules:
            module.reshard()


def _buckets(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[list[str]]:
    """Cut the names, in order, into runs whose tensors are summed together."""
    bucket: list[str] = []
    numel = 0
    for name, shape in shapes.items():
        if bucket and numel + math.prod(shape) > _BUCKET_NUMEL:
            yield bucket
            bucket, numel = [], 0
        bucket.append(name)
        numel += math.prod(shape)
    if bucket:
        yield bucket


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's storage of a tensor, sharded or plain, without its graph."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local()


def sharding_axis(weight: Tensor, dim: int) -> Axis | None:
    """Return the axis over which FSDP2 shards a weight along `dim`; None if it doesn't."""
    if not isinstance(weight, DTensor) or weight.placements[-1] != TorchShard(dim):
        return None
    mesh, last = weight.device_mesh, weight.device_mesh.ndim - 1
    return Axis("shards", mesh.size(last), mesh.get_local_rank(last), mesh.get_group(last), ())


def local_gradients(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the local storage of every existing gradient."""
    return {name: local_tensor(weight.grad) for name, weight in parameters if weight.grad is not None}


def holds_replicas(mesh: UpdateMesh, device: torch.device, *, parameters: torch.dtype, compute: torch.dtype) -> bool:
    """Return True if ranks hold whole plain copies: data is the only axis, and layers compute in the weights' float32.

    On CPUs only, whose cores also carry the messages: FSDP2's copies in each pass hide behind nothing there.
    """
    is_whole = mesh.dense_shards.size() == mesh.layout.data and mesh.model.size == 1 and mesh.expert.size == 1
    return device.type == "cpu" and mesh.layout.data > 1 and is_whole and parameters == compute == torch.float32


def sum_gradients(parameters: Sequence[Tensor], axis: Axis) -> None:
    """Replace each gradient by its sum over the replicas. Collective over the axis.

    A rank without a gradient that another has, because its memory ran out, takes part with zeros.
    """
    has_gradient = torch.tensor([one.grad is not None for one in parameters], dtype=torch.int32)
    some_have = axis.max(has_gradient).tolist()
    for parameter in (one for one, some in zip(parameters, some_have, strict=True) if some and one.grad is None):
        parameter.grad = torch.zeros_like(parameter)
    gradients = [one.grad for one in parameters if one.grad is not None]
    for gradient in (one for one in gradients if one.nbytes >= JOINED_BYTES):
        if gradient.is_contiguous():
            sum_into(gradient, axis.group)
        else:
            gradient.copy_(axis.sum(gradient.contiguous()))
    for together in _joined([one for one in gradients if one.nbytes < JOINED_BYTES]):
        flat = torch.cat([gradient.flatten() for gradient in together])
        sum_into(flat, axis.group)
        for gradient, total in zip(together, flat.split([one.numel() for one in together]), strict=True):
            gradient.copy_(total.view_as(gradient))


def _joined(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield runs of gradients of about JOINED_BYTES."""
    run: list[Tensor] = []
    for gradient in gradients:
        run.append(gradient)
        if sum(one.nbytes for one in run) >= JOINED_BYTES:
            yield run
            run = []
    if run:
        yield run
