"""Construction of this rank's part of a decoder: parallelism wraps plain modules from outside, in one fixed order.

Pipeline (layers), expert and tensor (slices of each weight), recomputation, then FSDP2 over the rest.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard as ShardPlacement
from torch.utils.checkpoint import checkpoint

from spmdrl.engines.models.decoder import Decoder, DecoderConfig
from spmdrl.engines.models.moe import Experts
from spmdrl.engines.parallel.expert_parallel import apply_expert_parallel, check_expert_parallel
from spmdrl.engines.parallel.tensor_parallel import apply_tensor_parallel, check_tensor_parallel
from spmdrl.engines.parallel.weight_cuts import Parts, expert_shard_dim
from spmdrl.engines.training.assignment import check_pipeline, layer_spans, stage_numbers
from spmdrl.engines.training.context.context_parallel import check_context_parallel
from spmdrl.engines.training.sharded_model import ShardedModel, holds_replicas
from spmdrl.resources.layout import UpdateLayout
from spmdrl.resources.mesh import Axis, UpdateMesh

# Gathering a few weights is bound by latency, not bandwidth: in a model of 19 MB a unit per layer took a tenth of an
# update.
ONE_UNIT_BYTES = 64 << 20
"""A stage of at most this many bytes in its compute dtype is gathered whole, once per pass."""


@dataclass(frozen=True)
class Precision:
    """Dtypes of trained weights, and of computation and frozen weights.

    Gradients are reduced in float32.
    """

    parameters: torch.dtype
    compute: torch.dtype


def check_layout(config: DecoderConfig, layout: UpdateLayout, key: str = "resources.update") -> None:
    """Raise ValueError if a model can't be cut by a fitted layout; needs no communication.

    `key` is the layout's place in the config.
    """
    check_pipeline(config, layout, key)
    if config.tied_head and layout.pipeline > 1 and layout.pipeline_schedule == "zbv":
        raise ValueError(
            f"{key}.pipeline_schedule is zbv, whose first rank also holds the head, but this model's head is "
            "its embedding, of which a rank holds one copy; set pipeline_schedule to zero_bubble or interleaved"
        )
    check_tensor_parallel(config, layout.tensor, f"{key}.tensor")
    check_context_parallel(config, key, tensor=layout.tensor, context=layout.context, kind=layout.context_kind)
    check_expert_parallel(config, layout.expert, f"{key}.expert")


def build_sharded_model(
    config: DecoderConfig, mesh: UpdateMesh, precision: Precision, *, device: torch.device, recompute: bool
) -> ShardedModel:
    """Build a model whose weights are this rank's shards, allocated but not yet filled. Collective over the mesh.

    Decoders are made on the meta device, so no rank ever holds more than its part. They stay plain modules if the data
    axes have one rank and layers compute in their weights' dtype, and if ranks `holds_replicas`.
    """
    spans = layer_spans(config.num_layers, mesh.pipeline.size * mesh.layout.pipeline_chunks)
    stages: dict[int, Decoder] = {}
    parts: dict[int, Parts] = {}
    is_replica = holds_replicas(mesh, device, parameters=precision.parameters, compute=precision.compute)
    for number in stage_numbers(mesh.pipeline, mesh.layout):
        with torch.device("meta"):
            decoder = Decoder(config, spans[number])
        _cast_parameters(decoder, precision)
        parts[number] = Parts.of(decoder)
        # Decided before cutting, so the same on all ranks. A pipeline gathers and reduces by rules of its own.
        num_bytes = sum(weight.numel() for weight in decoder.parameters()) * precision.compute.itemsize
        is_whole = num_bytes <= ONE_UNIT_BYTES and mesh.pipeline.size == 1
        apply_expert_parallel(decoder, mesh.expert, parts[number])
        apply_tensor_parallel(decoder, mesh.tensor, parts[number])
        if recompute:
            recompute_layers(decoder)
        if not is_replica:
            shard_modules(decoder, mesh, precision, whole=is_whole)
        stages[number] = decoder.to_empty(device=device)
    # A group of one rank accumulates in the compute dtype (`_fsdp_options`), unless each micro-batch is reduced.
    adds_up_in_float32 = (
        precision.compute == torch.float32 or min(mesh.dense_shards.size(), mesh.expert_shards.size()) > 1
    )
    return ShardedModel(
        config, stages, parts, mesh, is_replica=is_replica, reduces_once=is_whole and adds_up_in_float32
    )


def _cast_parameters(decoder: Decoder, precision: Precision) -> None:
    """Cast parameters; buffers keep their dtype: a router's correction is added in float32."""
    for path, module in decoder.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_trained = decoder.config.updates(f"{path}.{name}")
            dtype = precision.parameters if is_trained else precision.compute
            setattr(module, name, nn.Parameter(parameter.to(dtype), requires_grad=is_trained))


def recompute_layers(decoder: Decoder) -> None:
    """Keep only each layer's input for backward, and recompute the layer there (arXiv:1604.06174)."""
    for layer in decoder.layers:
        # On the instance, below the hooks: FSDP gathers the layer's weights before either run.
        recomputed = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        vars(layer)["forward"] = recomputed


def shard_modules(decoder: Decoder, mesh: UpdateMesh, precision: Precision, *, whole: bool) -> None:
    """Shard the experts, embedding, layers and head, then the rest; gradients are summed over ranks, not averaged.

    The root is resharded after forward as well, so that between two calls a rank holds only its shards. A `whole`
    decoder is one unit beside its experts; gathered weights stay until `ShardedModel.reshard`.
    """
    casts = precision.parameters != precision.compute
    sharded = mesh.dense_shards.size() > 1
    if not (sharded or casts):
        return
    lone: set[nn.Parameter] = set()
    if mesh.expert.size > 1:
        for experts in (module for module in decoder.modules() if isinstance(module, Experts)):
            if mesh.expert_shards.size() == 1 and not casts:
                # No other rank holds these experts: they stay plain, without copies.
                lone.update(experts.parameters())
                continue
            placement = functools.partial(_expert_placement, num_ranks=mesh.layout.expert_shard)
            options = _fsdp_options(mesh.expert_shards, mesh.pipeline, precision, stays=whole)
            _sum_gradients(fully_shard(experts, mesh=mesh.expert_shards, shard_placement_fn=placement, **options))
    options = _fsdp_options(mesh.dense_shards, mesh.pipeline, precision, stays=whole)
    # Embedding and head are each gathered on their own while in use; a tied weight stays with the root.
    ends = () if decoder.config.tied_head else (decoder.model.embed_tokens, decoder.lm_head, decoder.score)
    parts = [module for module in (*ends, *decoder.layers) if module is not None]
    for module in (decoder,) if whole else (*parts, decoder):
        _sum_gradients(fully_shard(module, mesh=mesh.dense_shards, ignored_params=lone or None, **options))
    if whole:
        assert isinstance(decoder, FSDPModule)
        decoder.set_reshard_after_backward(False)
    elif not decoder.config.tied_head and isinstance(decoder.model.embed_tokens, FSDPModule):
        # Its backward sums gradients by token, for which it needs no weights.
        decoder.model.embed_tokens.set_unshard_in_backward(False)


def _fsdp_options(shards: DeviceMesh, pipeline: Axis, precision: Precision, *, stays: bool) -> dict[str, Any]:
    """Return FSDP2's options for weights on these ranks.

    Gradients are summed in float32, over ranks and over micro-batches. On one rank without a pipeline FSDP2 sums
    nothing before it widens each micro-batch's gradient. It holds a module's gradient three times while it reduces it,
    so there it uses the narrower dtype. A pipeline's micro-batches are summed first and reduced once.
    """
    sums_nothing = shards.size() == 1 and pipeline.size == 1
    reduce_dtype = precision.compute if sums_nothing else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=reduce_dtype)
    return {"mp_policy": policy, "reshard_after_forward": not stays}


def _sum_gradients(module: FSDPModule) -> None:
    # Shares of the loss add up over ranks, so gradients must too: a plain sum is exact for any number of ranks.
    module.set_force_sum_reduction_for_comms(True)
    module.set_gradient_divide_factor(1.0)


def _expert_placement(parameter: nn.Parameter, *, num_ranks: int) -> ShardPlacement:
    return ShardPlacement(expert_shard_dim(parameter.shape, num_ranks))
