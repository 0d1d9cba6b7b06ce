"""Switches of a model with adapters: no more moves than must, and what it generates with is what was trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spmdrl.dataflow.resharding.flow import ReshardingFlow
from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.model_folder import parameter_shapes
from spmdrl.engines.models.lora import is_adapter
from spmdrl.engines.models.make_model import RandomWeights
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.roles import POLICY
from spmdrl.nouns.settings.flow_config import ReshardConfig
from spmdrl.nouns.settings.model_config import LoraConfig
from spmdrl.nouns.settings.model_sizes import DeltaSizes
from spmdrl.nouns.settings.rollout_config import RolloutConfig
from spmdrl.nouns.settings.training_config import TrainingConfig
from spmdrl.resources.layout import GenerationLayout, UpdateLayout
from spmdrl.resources.memory import MemoryLedger
from spmdrl.resources.mesh import build_generation_mesh, build_update_mesh
from spmdrl.resources.world import World
from tests.dataflow.resharding.engines import StreamedGenerator
from tests.engines.training.tiny import CONFIG, OPTIM, make_rows, weighted_nll, whole_weights
from tests.support.ranks import run_ranks

MODEL = replace(CONFIG, intermediate_size=16, lora=LoraConfig(rank=4, alpha=8.0))
HYBRID = replace(
    MODEL,
    model_type="qwen3_5_text",
    delta=DeltaSizes((0,), num_key_heads=2, num_value_heads=4, key_size=4, value_size=4, conv_width=3),
)
PLAIN = replace(MODEL, lora=None)
ROWS = [[1, 5, 7, 9, 4], [2, 3, 11]]
CASES = [
    (2, MODEL, UpdateLayout(shard=2), GenerationLayout()),
    (2, MODEL, UpdateLayout(data=2, shard=1), GenerationLayout()),
    (4, MODEL, UpdateLayout(shard=2, pipeline=2), GenerationLayout(tensor=2)),
    (4, MODEL, UpdateLayout(shard=2, tensor=2), GenerationLayout(tensor=2)),
    (2, HYBRID, UpdateLayout(shard=2), GenerationLayout(tensor=2)),
]
# On a device, a switch of two axes, and the kind of layers that the others lack.
_THERE_TOO = [pytest.mark.slow, pytest.mark.on_device]
MARKS = {1: pytest.mark.slow, 3: _THERE_TOO, 4: _THERE_TOO}


def trainer_of(world: World, layout: UpdateLayout, model: DecoderConfig = MODEL) -> TrainingEngine:
    mesh = build_update_mesh(layout, world.device, world.rank)
    engine = TrainingEngine(model, TrainingConfig(), OPTIM, mesh, world.device, compute_dtype=torch.float32)
    engine.load(RandomWeights(model, seed=1))
    return engine


# Two engines are awake at once.
ROLLOUT = RolloutConfig(kv_cache_gib=0.1)


def update(trainer: TrainingEngine) -> None:
    axis = trainer.mesh.data
    trainer.update(make_rows(12).select(list(range(12))[axis.rank :: axis.size]), weighted_nll)


def lacking_bytes(trainer: TrainingEngine, generator: NativeEngine, wanted=is_adapter) -> int:
    """Bytes of the slices that this rank wants and doesn't hold."""
    held = {name: shard.slice for name, shard in trainer.named_shards().items()}
    lacking = 0
    for name, box in generator.weight_slices().items():
        common = held[name].intersect(box) if name in held else None
        if wanted(name):
            lacking += 4 * (box.num_elements - (common.num_elements if common else 0))
    return lacking


def switched(
    world: World, model: DecoderConfig, update_layout: UpdateLayout, layout: GenerationLayout, folder: Path
) -> list[tuple]:
    """Of three switches with an update before each: bytes received, bytes lacking, and the log-probs of some rows."""
    trainer = trainer_of(world, update_layout, model)
    mesh = build_generation_mesh(layout, world.device, world.size, world.rank)
    generator = NativeEngine(model, ROLLOUT, world.device.torch_device, torch.float32, mesh=mesh)
    reshard = ReshardConfig(bucket_bytes=4096, verify=True)
    flow = ReshardingFlow(world, {POLICY: trainer}, generator, reshard, MemoryLedger(), folder)
    found = []
    for step in range(3):
        update(trainer)
        expected = whole_weights(trainer)
        stats = flow.to_generation()
        lacking = lacking_bytes(trainer, generator, (lambda name: True) if step == 0 else is_adapter)
        plain = NativeEngine(replace(model, lora=None), ROLLOUT, world.device.torch_device, torch.float32, mesh=mesh)
        plain.load_weights((name, expected[name]) for name in plain.weight_shapes())
        plain.wake_cache()
        differences = torch.cat(generator.score(ROWS)) - torch.cat(plain.score(ROWS))
        found.append((stats.received_bytes, lacking, stats.planned_bytes, float(differences.abs().max())))
        flow.start_return()
        flow.to_update()
    flow.close()
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("num_ranks", "model", "update_layout", "layout"),
    [
        pytest.param(
            *case,
            id=f"{case[1].model_type}, {case[2]} to {case[3]}",
            marks=MARKS.get(number, ()),
        )
        for number, case in enumerate(CASES)
    ],
)
def test_each_rank_receives_the_slices_of_adapters_that_it_lacks(num_ranks, model, update_layout, layout, tmp_path):
    by_rank = run_ranks(num_ranks, switched, model, update_layout, layout, tmp_path, timeout=200)
    for of_ranks in zip(*by_rank, strict=True):
        assert all(received == lacking and difference < 1e-5 for received, lacking, _, difference in of_ranks)
        (planned,) = {planned for _, _, planned, _ in of_ranks}
        assert planned == sum(received for received, *_ in of_ranks)
    first, second, third = by_rank[0]
    assert second == pytest.approx(third, abs=1e-5) and (second[0] < first[0] or first[0] == 0)


def streamed(world: World, folder: Path) -> list[float]:
    trainer = trainer_of(world, UpdateLayout(shard=world.size))
    generator = StreamedGenerator(parameter_shapes(PLAIN))
    flow = ReshardingFlow(world, {POLICY: trainer}, generator, ReshardConfig(verify=True), MemoryLedger(), folder)
    differences = []
    for _ in range(2):
        update(trainer)
        expected = whole_weights(trainer)
        flow.to_generation()
        assert generator.weights.keys() == expected.keys()
        differences += [float((generator.weights[name].cpu() - one).abs().max()) for name, one in expected.items()]
        flow.start_return()
        flow.to_update()
    flow.close()
    return differences


@pytest.mark.ranks
def test_an_engine_that_takes_whole_weights_gets_merged_ones(tmp_path):
    for differences in run_ranks(2, streamed, tmp_path, timeout=120):
        assert max(differences) == 0 and len(differences) == 2 * len(parameter_shapes(PLAIN))
