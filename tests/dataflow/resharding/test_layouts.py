"""Slices on paper are those that the training engine's shards have, and those that a generator needs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spmdrl.dataflow.resharding.planning.slice_layouts import (
    fitted_stride,
    generation_slices,
    parameter_table,
    update_slices,
)
from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.models.decoder import Decoder
from spmdrl.engines.parallel.expert_parallel import apply_expert_parallel
from spmdrl.engines.parallel.tensor_parallel import apply_tensor_parallel
from spmdrl.engines.parallel.weight_cuts import Parts
from spmdrl.engines.training.parallelize import Precision, build_sharded_model
from spmdrl.nouns.batch import WeightSlice
from spmdrl.nouns.settings.rollout_config import RolloutConfig
from spmdrl.resources.layout import GenerationLayout, UpdateLayout, fit_update_layout
from spmdrl.resources.mesh import GenerationMesh, build_update_mesh
from spmdrl.resources.world import World
from tests.dataflow.resharding.tables import MODELS
from tests.engines.training.tiny import axis_of
from tests.support.ranks import run_ranks

FLOAT32 = Precision(torch.float32, torch.float32)
TWO_RANKS = [
    *((model, UpdateLayout(shard=2)) for model in MODELS),
    ("dense", UpdateLayout(data=2)),
    ("dense", UpdateLayout(pipeline=2)),
    ("mla", UpdateLayout(pipeline=2, pipeline_schedule="zbv", pipeline_chunks=2)),
    ("moe", UpdateLayout(tensor=2)),
    ("mla", UpdateLayout(expert=2)),
]
FOUR_RANKS = [
    ("dense", UpdateLayout(pipeline=2, tensor=2)),
    ("dense", UpdateLayout(pipeline=2, pipeline_schedule="interleaved", pipeline_chunks=2)),
    ("dense", UpdateLayout(data=2, context=2)),
    ("moe", UpdateLayout(shard=4)),
    # Two key heads on four ranks.
    ("moe", UpdateLayout(tensor=4)),
    ("moe", UpdateLayout(data=2, shard=2, expert=2)),
    ("moe", UpdateLayout(shard=2, context=2, expert=2)),
    ("moe", UpdateLayout(shard=2, tensor=2, expert=2)),
    ("moe", UpdateLayout(data=4, expert=4)),
    ("mla", UpdateLayout(data=2, tensor=2, expert=2)),
    ("mla", UpdateLayout(pipeline=2, shard=2, expert=2)),
    ("mla", UpdateLayout(shard=4, expert=2)),
]
THREE_RANKS = [
    ("dense", UpdateLayout(tensor=3)),
    ("dense", UpdateLayout(pipeline=3)),
    ("moe", UpdateLayout(shard=3, expert=3)),
    ("mla", UpdateLayout(tensor=3)),
]

Case = tuple[str, UpdateLayout]


def config_of(case: Case):
    """A model with a layer more than the layout has stages."""
    model, layout = case
    return replace(MODELS[model], num_layers=max(2, layout.pipeline * layout.pipeline_chunks + 1))


def held_slices(world: World, cases: list[Case]) -> list[dict[str, WeightSlice]]:
    """The slices of the engine's shards on this rank, case by case."""
    out = []
    for model, layout in cases:
        mesh = build_update_mesh(fit_update_layout(layout, world.size), world.device, world.rank)
        config = config_of((model, layout))
        sharded = build_sharded_model(config, mesh, FLOAT32, device=world.device.torch_device, recompute=False)
        out.append({name: shard.slice for name, shard in sharded.named_shards().items()})
    return out


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("num_ranks", "cases"), [(2, TWO_RANKS), (3, THREE_RANKS), pytest.param(4, FOUR_RANKS, marks=pytest.mark.slow)]
)
def test_update_slices_are_what_the_training_engine_holds(num_ranks, cases):
    for rank, held_by_case in enumerate(run_ranks(num_ranks, held_slices, cases)):
        for (model, layout), held in zip(cases, held_by_case, strict=True):
            table = parameter_table(config_of((model, layout)))
            planned = update_slices(table, fit_update_layout(layout, num_ranks), rank)
            assert {box.name: box for box in planned} == held, (model, str(layout), rank)


@pytest.mark.parametrize(("model", "tensor"), [("dense", 6), ("dense", 12), ("moe", 8), ("mla", 6)])
def test_tensor_cuts_are_the_engines_where_key_heads_are_split_or_shared(model, tensor):
    table = parameter_table(MODELS[model])
    for rank in range(tensor):
        with torch.device("meta"):
            decoder = Decoder(MODELS[model])
        parts = Parts.of(decoder)
        apply_tensor_parallel(decoder, axis_of("tensor", tensor, rank), parts)
        planned = update_slices(table, UpdateLayout(shard=1, tensor=tensor), rank)
        assert {box.name: box for box in planned} == parts.slices


@pytest.mark.parametrize(("model", "expert"), [("moe", 6), ("moe", 12), ("mla", 6)])
def test_expert_cuts_are_the_engines(model, expert):
    table = parameter_table(MODELS[model])
    for rank in range(expert):
        with torch.device("meta"):
            decoder = Decoder(MODELS[model])
        parts = Parts.of(decoder)
        apply_expert_parallel(decoder, axis_of("expert", expert, rank), parts)
        planned = update_slices(table, UpdateLayout(data=expert, shard=1, expert=expert), rank)
        assert {box.name: box for box in planned} == parts.slices


def generated(model: str, layout: GenerationLayout, rank: int) -> dict[str, WeightSlice]:
    return {box.name: box for box in generation_slices(parameter_table(MODELS[model]), layout, rank)}


def test_generation_ranks_have_the_key_heads_of_their_query_heads_and_the_last_may_have_none():
    # Threes of 12 query heads, in pairs on 6 key heads, so that neighbours share a key head.
    keys, tokens = [], []
    for rank in range(5):
        held = generated("dense", GenerationLayout(tensor=5), rank)
        box = held["model.layers.1.self_attn.v_proj.weight"]
        keys.append((box.starts[0] // 2, box.stops[0] // 2))
        tokens.append(held["model.embed_tokens.weight"].shape[0])
    assert keys == [(0, 2), (1, 3), (3, 5), (4, 6), (6, 6)]
    assert tokens == [10, 10, 10, 10, 7]


def test_generation_experts_are_whole_where_they_are_dealt_out_and_cut_like_matrices_where_not():
    name = "model.layers.1.mlp.experts.down_proj"
    dealt = [generated("moe", GenerationLayout(tensor=2, expert=4), rank)[name] for rank in range(4)]
    assert [(box.starts[0], box.stops[0]) for box in dealt] == [(0, 3), (3, 6), (6, 9), (9, 12)]
    assert {box.shape for box in dealt} == {(3, 5, 8)}
    assert generated("moe", GenerationLayout(tensor=2), 3)[name].shape == (12, 5, 4)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("dense", GenerationLayout(2)),
        ("dense", GenerationLayout(2, tensor_stride=2)),
        ("moe", GenerationLayout(4)),
        ("moe", GenerationLayout(expert=4)),
        ("moe", GenerationLayout(2, expert=4)),
        ("moe", GenerationLayout(2, expert=4, tensor_stride=2)),
        ("mla", GenerationLayout(2, expert=2)),
    ],
)
def test_generation_slices_are_those_that_the_engine_wants(model, layout, device):
    ranks = sorted(range(8), key=layout.place)
    replicas = tuple(tuple(ranks[first : first + layout.tensor]) for first in range(0, 8, layout.tensor))
    num_sharing = max(1, layout.expert // layout.tensor)
    for rank in range(8):
        replica, place = layout.place(rank)
        mesh = GenerationMesh(
            layout,
            rank,
            replicas,
            tensor=axis_of("tensor", layout.tensor, place),
            expert=axis_of("expert", num_sharing, replica % num_sharing),
        )
        engine = NativeEngine(MODELS[model], RolloutConfig(), device, torch.float32, mesh=mesh)
        assert generated(model, layout, rank) == engine.weight_slices()


@pytest.mark.parametrize(
    ("update", "generation", "ranks_per_node", "stride"),
    [
        # Two ranks have what one wants: every other rank forms an engine.
        (UpdateLayout(shard=1, tensor=8), GenerationLayout(4), 8, 2),
        (UpdateLayout(shard=1, data=2, tensor=4), GenerationLayout(2), 8, 2),
        # An engine of every other rank would not fit on a node.
        (UpdateLayout(shard=1, tensor=8), GenerationLayout(4), 4, 1),
        (UpdateLayout(shard=1, data=2, tensor=4), GenerationLayout(4), 8, 1),
        (UpdateLayout(shard=1, tensor=8), GenerationLayout(), 8, 1),
        (UpdateLayout(shard=1, tensor=8), GenerationLayout(4, tensor_stride=1), 8, 1),
    ],
)
def test_engines_are_made_of_ranks_that_hold_most_of_their_slices(update, generation, ranks_per_node, stride):
    table = parameter_table(replace(MODELS["dense"], num_heads=8, num_kv_heads=8, intermediate_size=16))
    assert fitted_stride(table, update, generation, ranks_per_node).tensor_stride == stride
