"""The part of a model that one rank holds for training: its stages, and which slice of which weight each tensor is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from spmdrl.engines.models.decoder import Decoder, DecoderConfig
from spmdrl.engines.models.hf.model_folder import buffer_dtypes, parameter_shapes
from spmdrl.engines.models.lora import adapted_linears, is_adapter
from spmdrl.engines.parallel.parts import Parts
from spmdrl.engines.parallel.tensor_parallel import is_first
from spmdrl.engines.parallel.weight_cuts import chunk_of
from spmdrl.resources.collectives import sum_over
from spmdrl.resources.mesh import UpdateMesh
from spmdrl.types import WeightSlice, whole_slice

_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Shard:
    """A rank's part of one named tensor; it may be empty."""

    tensor: Tensor
    """The local storage itself, not a copy."""
    slice: WeightSlice
    """Which box of the whole tensor it holds."""
    global_shape: tuple[int, ...]
    is_first: bool = True
    """Whether no other rank counts as the holder of these elements: over all ranks, first shards tile the tensor."""


class ShardedModel:
    """The decoder stages of one rank, cut and sharded by the layout, under the names of the whole model."""

    def __init__(self, config: DecoderConfig, stages: dict[int, Decoder], parts: dict[int, Parts], mesh: UpdateMesh):
        self.config = config
        self.stages = stages
        """By stage number; with one pipeline rank and one chunk, the whole decoder is stage 0."""
        self.mesh = mesh
        self.parts = parts
        """What each stage holds before FSDP2 shards it."""
        self._part_of = {name: held for held in parts.values() for name in held.slices}
        self._buffers = {name for decoder in stages.values() for name, _ in decoder.named_buffers()}
        self._places: dict[tuple[str, bool], tuple[WeightSlice, bool]] = {}
        """By name, and by whether FSDP2 shards it: the box that this rank holds, and whether as the first."""
        # The stage with the embedding counts as the holder of a tied head.
        self._copies = {_EMBEDDING} if any(_is_tied_copy(decoder) for decoder in stages.values()) else set()

    @property
    def decoders(self) -> list[Decoder]:
        return list(self.stages.values())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for decoder in self.decoders:
            yield from decoder.named_parameters()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters, then the buffers that belong to the weights."""
        yield from self.named_parameters()
        for decoder in self.decoders:
            yield from decoder.named_buffers()

    def named_shards(self) -> dict[str, Shard]:
        return {name: self.shard_of(name, weight) for name, weight in self.named_weights()}

    @torch.no_grad()
    def merged_shards(self) -> dict[str, Shard]:
        """The shards of the model's own weights; to those with an adapter it is added, in float32.

        Collective over the ranks that share a weight's shards.
        """
        shards = {name: shard for name, shard in self.named_shards().items() if not is_adapter(name)}
        for decoder in self.decoders:
            for path, linear in adapted_linears(decoder):
                shard, up = shards[f"{path}.weight"], linear.lora_A.weight
                whole_up = up.full_tensor() if isinstance(up, DTensor) else up
                # Cut along its outputs as the projection is.
                down = local_tensor(linear.lora_B.weight)
                merged = shard.tensor.float() + linear.scale * (down.float() @ whole_up.float())
                shards[f"{path}.weight"] = replace(shard, tensor=merged)
        return shards

    def named_gradients(self) -> dict[str, Shard]:
        """The gradients that are there, cut as the weights are."""
        return {
            name: self.shard_of(name, parameter.grad)
            for name, parameter in self.named_parameters()
            if parameter.grad is not None
        }

    def shard_of(self, name: str, tensor: Tensor) -> Shard:
        """The part that this rank holds of a weight, or of a gradient or mean that is cut like it."""
        key, local = (name, isinstance(tensor, DTensor)), local_tensor(tensor)
        if key not in self._places:
            self._places[key] = self._place_of(name, tensor)
        box, first = self._places[key]
        assert local.shape == box.shape, (name, tuple(local.shape), box)
        return Shard(local, box, self._part_of[name].shapes[name], first)

    def _place_of(self, name: str, tensor: Tensor) -> tuple[WeightSlice, bool]:
        """The box of a tensor that this rank holds, and whether no other rank counts as its holder."""
        parts = self._part_of[name]
        box, first = parts.slices[name], name not in self._copies
        if self.mesh.tensor.size > 1:
            first = first and is_first(name, self.mesh.tensor, parts)
        if isinstance(tensor, DTensor):
            for axis, placement in enumerate(tensor.placements):
                size, rank = tensor.device_mesh.size(axis), tensor.device_mesh.get_local_rank(axis)
                if placement.is_shard():
                    box = box.narrowed(placement.dim, *chunk_of(box.shape[placement.dim], size, rank))
                else:
                    first = first and rank == 0
        elif name in self._buffers:
            first = first and self.mesh.data.rank == 0 and self.mesh.context.rank == 0
        return box, first

    def gather_whole(
        self, shards: Mapping[str, Shard], dtype: torch.dtype, *, wanted: Callable[[str], bool] = lambda name: True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor whole, good until the next one. Collective over all ranks: each takes all of them.

        The shards are weights, or gradients under the weights' names, of those that are `wanted`; what some rank lacks
        counts as 0. Buffers keep their own dtype.
        """
        kept = buffer_dtypes(self.config)
        device = next(iter(self.named_weights()))[1].device
        for name, shape in parameter_shapes(self.config).items():
            if not wanted(name):
                continue
            # Sums of bits with zeros keep every bit; of numbers, they would lose the sign of -0.
            bits = torch.zeros(shape, dtype=torch.int32, device=device)
            shard = shards.get(name)
            if shard is not None and shard.is_first and shard.slice.num_elements:
                bits[shard.slice.index_within(whole_slice(name, shape))] = (
                    shard.tensor.detach().to(torch.float32).view(torch.int32)
                )
            yield name, sum_over(bits).view(torch.float32).to(kept.get(name, dtype))

    def tied_gradients(self) -> list[Tensor]:
        """What this rank stores of the gradients of a tied weight: of the embedding, or of the head's copy of it.

        None where it is frozen, on all ranks alike.
        """
        held = [decoder.model.embed_tokens for decoder in self.decoders]
        return [local_tensor(one.weight.grad) for one in held if one is not None and one.weight.grad is not None]

    def reshard(self) -> None:
        """Leave nothing on the device but this rank's shards."""
        for decoder in self.decoders:
            for module in decoder.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


def _is_tied_copy(decoder: Decoder) -> bool:
    """Whether the stage holds an embedding for its head alone."""
    return decoder.config.tied_head and decoder.span.heads and not decoder.span.embeds


def local_tensor(tensor: Tensor) -> Tensor:
    """The storage that this rank holds of a tensor, sharded or plain, without its graph."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def local_gradients(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """The local storage of every gradient that is there."""
    return {name: local_tensor(weight.grad) for name, weight in parameters if weight.grad is not None}
