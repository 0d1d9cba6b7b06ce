"""Parameter tables of tiny models with awkward sizes, and all layouts of so many ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from spmdrl.dataflow.resharding.planning.plan import Shapes
from spmdrl.dataflow.resharding.planning.slice_layouts import ParameterTable, parameter_table
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.training.parallelize import check_layout
from spmdrl.nouns.batch import WeightSlice, whole_slice
from spmdrl.nouns.settings.model_sizes import LatentConfig, MoeConfig
from spmdrl.resources.layout import GenerationLayout, UpdateLayout, fit_update_layout

# 47 tokens and a width of 5 divide by nothing; on 12 tensor ranks, two have the same one of 6 key heads.
DENSE = DecoderConfig(
    model_type="qwen3",
    vocab_size=47,
    hidden_size=5,
    intermediate_size=12,
    num_layers=3,
    num_heads=12,
    num_kv_heads=6,
    head_size=2,
    rms_eps=1e-6,
    rope_theta=10000.0,
    qk_norm=True,
    attention_bias=True,
    tied_head=True,
    max_positions=64,
)
# Key heads are fewer than 4 or 8 tensor ranks. All layers but the first are sparse.
MOE = replace(
    DENSE,
    model_type="qwen3_moe",
    vocab_size=53,
    intermediate_size=8,
    num_heads=8,
    num_kv_heads=2,
    attention_bias=False,
    tied_head=False,
    moe=MoeConfig(num_experts=12, experts_per_token=3, intermediate_size=8, normalize=True, dense_layers=(0,)),
)
# Three experts on each of 2 expert ranks don't go into 2 shards: those are cut by width, or unevenly.
LATENT = replace(
    DENSE,
    model_type="deepseek_v3",
    intermediate_size=6,
    num_heads=6,
    num_kv_heads=6,
    head_size=4,
    qk_norm=False,
    attention_bias=False,
    tied_head=False,
    moe=MoeConfig(
        num_experts=6,
        experts_per_token=2,
        intermediate_size=6,
        scoring="sigmoid",
        num_shared_experts=1,
        dense_layers=(0,),
    ),
    latent=LatentConfig(query_rank=7, key_value_rank=3, plain_size=2, rotary_size=2, value_size=3),
)
MODELS = {"dense": DENSE, "moe": MOE, "mla": LATENT}

_SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("zbv", 2))
_NUM_LAYERS = 17
"""Two stages or more a rank, unevenly, in any pipeline of up to 8 ranks, and one in any of 16."""


def deep_config(model: str) -> DecoderConfig:
    return replace(MODELS[model], num_layers=_NUM_LAYERS)


def deep_table(model: str) -> ParameterTable:
    """The weights of a deep model, without those that are cut and held just as another one is."""
    table = parameter_table(deep_config(model))
    kept = {name: rule for name, rule in table.rules.items() if rule.layer in (None, 0) or _is_kept(name, rule.layer)}
    return ParameterTable(kept, table.num_layers)


def _is_kept(name: str, layer: int) -> bool:
    if layer == _NUM_LAYERS - 1:
        return ".mlp." in name
    return name.endswith("input_layernorm.weight") and layer % 3 == 1


def update_layouts(model: str, num_ranks: int) -> Iterator[UpdateLayout]:
    """Every layout of so many ranks that the training engine takes for the model."""
    config, degrees = deep_config(model), _divisors(num_ranks)
    for pipeline, data, context, tensor, expert in itertools.product(degrees, repeat=5):
        layout = UpdateLayout(data=data, pipeline=pipeline, context=context, tensor=tensor, expert=expert)
        for schedule, chunks in _SCHEDULES if pipeline > 1 else _SCHEDULES[:1]:
            scheduled = replace(layout, pipeline_schedule=schedule, pipeline_chunks=chunks)
            try:
                fitted = fit_update_layout(scheduled, num_ranks)
                check_layout(config, fitted)
            except ValueError:
                continue
            yield fitted


def generation_layouts(model: str, num_ranks: int) -> Iterator[GenerationLayout]:
    """Every generation layout of so many ranks, also those that don't divide the model's sizes."""
    divisors = _divisors(num_ranks)
    for tensor, expert in itertools.product(divisors, divisors if MODELS[model].moe else [1]):
        # Neighbours share a matrix, or ranks that are as far apart as can be.
        strides = {1, num_ranks // tensor if tensor > 1 else 1}
        if expert == 1 or expert % tensor == 0:
            yield from (GenerationLayout(tensor, expert, stride) for stride in sorted(strides))


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def whole_slices(shapes: Shapes) -> list[WeightSlice]:
    """One slice per weight, holding all of it."""
    return [whole_slice(name, shape) for name, shape in shapes.items()]


def fsdp_slices(shapes: Shapes, shard_size: int, rank: int) -> list[WeightSlice]:
    """The slices of shard rank `rank`: dim 0 cut as `torch.chunk` does, so last shards may be short or empty."""
    slices = []
    for name, shape in shapes.items():
        if not shape:
            raise ValueError(f"{name} is a scalar; only weights with at least one dim can be sharded along dim 0")
        rows = -(-shape[0] // shard_size)
        start, stop = min(rank * rows, shape[0]), min((rank + 1) * rows, shape[0])
        slices.append(WeightSlice(name, (start, *[0] * (len(shape) - 1)), (stop, *shape[1:])))
    return slices
