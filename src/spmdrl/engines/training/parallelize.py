"""Puts FSDP2 around a plain decoder, from outside, and says which slice of each weight a rank then holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement

from spmdrl.engines.models.decoder import Decoder, DecoderConfig
from spmdrl.resources.mesh import UpdateMesh
from spmdrl.types import WeightSlice


@dataclass(frozen=True)
class Shard:
    """A rank's part of one named tensor; it may be empty."""

    tensor: Tensor
    """The local storage itself, not a copy."""
    slice: WeightSlice
    """Which box of the whole tensor it holds."""
    global_shape: tuple[int, ...]


def build_sharded_decoder(
    config: DecoderConfig,
    mesh: UpdateMesh,
    *,
    device: torch.device,
    parameter_dtype: torch.dtype,
    compute_dtype: torch.dtype,
) -> Decoder:
    """Build a decoder whose weights are this rank's shards, allocated but not yet filled. Collective over the mesh.

    The decoder is made on the meta device, so no rank ever holds the whole model. It stays a plain module where one
    rank holds all of it and computes in the dtype of its parameters.
    """
    with torch.device("meta"):
        decoder = Decoder(config).to(parameter_dtype)
    if mesh.dense_shards.size() > 1 or parameter_dtype != compute_dtype:
        shard_modules(decoder, mesh, MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32))
    return decoder.to_empty(device=device)


def shard_modules(decoder: Decoder, mesh: UpdateMesh, policy: MixedPrecisionPolicy) -> None:
    """Shard each layer, then what is left in the root; gradients are summed over the data ranks, not averaged.

    The root is resharded after forward as well, so that between two calls a rank holds nothing but its shards.
    """
    for module in (*decoder.layers, decoder):
        fully_shard(module, mesh=mesh.dense_shards, mp_policy=policy, reshard_after_forward=True)
        assert isinstance(module, FSDPModule)
        # Shares of the loss add up over ranks, so gradients must too: a plain sum is exact for any number of ranks.
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)


def local_tensor(tensor: Tensor) -> Tensor:
    """The storage that this rank holds of a tensor, sharded or plain, without its graph."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def shard_of(name: str, parameter: Tensor) -> Shard:
    """The part of a named tensor that this rank holds: all of a plain one, dim-0 rows of a sharded one."""
    local, shape = local_tensor(parameter), tuple(parameter.shape)
    start, stop = (0, shape[0])
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if placement.is_shard():
                assert placement == ShardPlacement(0), (name, placement)
                mesh = parameter.device_mesh
                start, stop = rows_held(shape[0], mesh.size(axis), mesh.get_local_rank(axis))
    assert local.shape == (stop - start, *shape[1:]), (name, tuple(local.shape), start, stop, shape)
    zeros = (0,) * (len(shape) - 1)
    return Shard(local, WeightSlice(name, (start, *zeros), (stop, *shape[1:])), shape)


def rows_held(num_rows: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """The half-open interval of rows that FSDP2 gives a rank: chunks rounded up, so the last may be short or empty."""
    chunk = -(-num_rows // num_ranks)
    return min(rank * chunk, num_rows), min((rank + 1) * chunk, num_rows)


def whole_tensor(tensor: Tensor) -> Tensor:
    """All of a named tensor on this rank's device. Collective over the mesh where it is sharded."""
    with torch.no_grad():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
