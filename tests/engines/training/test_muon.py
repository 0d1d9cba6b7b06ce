"""Muon's steps: torch's own in one process, and the same bits in every layout and after every checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.model_folder import parameter_shapes
from spmdrl.engines.models.make_model import RandomWeights
from spmdrl.engines.parallel.muon import is_matrix
from spmdrl.engines.training.checkpoints.trainer_state import (
    ShardFiles,
    load_trainer_state,
    trainer_state,
    write_shards,
)
from spmdrl.engines.training.sharded_model import local_tensor
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.engines.training.updater import Accumulated
from spmdrl.nouns.settings.model_sizes import MoeConfig
from spmdrl.nouns.settings.training_config import OptimConfig, TrainingConfig
from spmdrl.resources.layout import UpdateLayout, fit_update_layout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World
from tests.engines.training.tiny import CONFIG, LATENT, make_rows, part_of, weighted_nll, whole_weights
from tests.support.ranks import run_ranks

OPTIM = OptimConfig(name="muon", lr=1e-2, weight_decay=0.1, max_grad_norm=float("inf"))
# Key heads that tensor ranks share, experts, and rows that no number of ranks divides.
DENSE = replace(CONFIG, num_kv_heads=1)
SPARSE = replace(
    CONFIG, model_type="qwen3_moe", intermediate_size=16, moe=MoeConfig(4, 2, 6, normalize=True, dense_layers=(0,))
)


def engine_of(world: World, config: DecoderConfig, layout: UpdateLayout) -> TrainingEngine:
    mesh = build_update_mesh(fit_update_layout(layout, world.size), world.device, world.rank)
    engine = TrainingEngine(config, TrainingConfig(), OPTIM, mesh, world.device, compute_dtype=torch.float32)
    engine.load(RandomWeights(config, seed=1))
    return engine


def step(engine: TrainingEngine, seed: int) -> None:
    """Make a step with the same gradients in every layout."""
    generator = torch.Generator().manual_seed(seed)
    shards = engine.named_shards()
    weights = dict(engine.model.named_parameters())
    for name, shape in parameter_shapes(engine.config).items():
        whole = torch.randn(shape, generator=generator)
        if name in weights:
            weights[name].grad = torch.zeros_like(weights[name])
            local_tensor(weights[name].grad).copy_(part_of(whole, shards[name].slice))
    assert not engine.step(Accumulated([], None, 1)).skipped
    engine.drop_gradients()
    assert all(weight.grad is None for weight in weights.values())


def test_one_process_makes_the_steps_of_torchs_muon_and_adamw(world: World) -> None:
    engine = engine_of(world, DENSE, UpdateLayout())
    weights = dict(engine.model.named_parameters())
    ours = {name for name in weights if is_matrix(name)}
    assert len(ours) == 2 * 7 and "lm_head.weight" not in ours and "model.embed_tokens.weight" not in ours
    theirs = {name: torch.nn.Parameter(weight.detach().clone()) for name, weight in weights.items()}
    muon = torch.optim.Muon(
        [theirs[name] for name in weights if name in ours],
        lr=OPTIM.lr, weight_decay=OPTIM.weight_decay, adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    adamw = torch.optim.AdamW(
        [theirs[name] for name in weights if name not in ours], lr=OPTIM.lr, weight_decay=OPTIM.weight_decay, fused=True
    )
    for seed in range(3):
        engine.model.reshard()
        accumulated = engine.accumulate(make_rows(seed=seed), weighted_nll)
        for name, weight in weights.items():
            theirs[name].grad = weight.grad.clone()
        engine.step(accumulated)
        engine.drop_gradients()
        muon.step()
        adamw.step()
        for name, weight in weights.items():
            assert torch.equal(weight, theirs[name]), name
    state = engine.optimizer_state()
    assert {name for name, means in state.items() if list(means) == ["momentum_buffer"]} == ours


LAYOUTS = {
    2: [
        (DENSE, UpdateLayout(shard=2)), (DENSE, UpdateLayout(data=2, shard=1)),
        (DENSE, UpdateLayout(shard=1, tensor=2)),
        (DENSE, UpdateLayout(shard=1, pipeline=2)), (SPARSE, UpdateLayout(shard=2, expert=2)),
        (SPARSE, UpdateLayout(shard=2)), (SPARSE, UpdateLayout(shard=1, context=2)),
        (replace(LATENT, num_layers=1), UpdateLayout(shard=1, tensor=2)),
    ],
    4: [
        (DENSE, UpdateLayout(shard=2, tensor=2)), (DENSE, UpdateLayout(data=2, shard=2)),
        (DENSE, UpdateLayout(shard=4)), (DENSE, UpdateLayout(shard=2, pipeline=2)),
        (CONFIG, UpdateLayout(shard=1, tensor=4)),
        (SPARSE, UpdateLayout(shard=4, expert=2)), (SPARSE, UpdateLayout(shard=2, tensor=2, expert=2)),
    ],
}  # fmt: skip


def stepped(world: World, config: DecoderConfig, layout: UpdateLayout, seeds: tuple[int, ...]) -> dict[str, Tensor]:
    engine = engine_of(world, config, layout)
    for seed in seeds:
        step(engine, seed)
    return {name: weight.clone() for name, weight in whole_weights(engine).items()}


def stepped_in_layouts(world: World) -> list[dict[str, Tensor]]:
    return [stepped(world, config, layout, (0, 1)) for config, layout in LAYOUTS[world.size]]


@pytest.mark.on_device
@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_layout_makes_the_steps_of_one_process_to_the_bit(num_ranks: int, world: World) -> None:
    results = run_ranks(num_ranks, stepped_in_layouts)
    for number, (config, layout) in enumerate(LAYOUTS[num_ranks]):
        expected = stepped(world, config, UpdateLayout(), (0, 1))
        for found in results:
            for name, weight in expected.items():
                assert torch.equal(found[number][name], weight), (layout, name)


def save_after_one_step(world: World, config: DecoderConfig, layout: UpdateLayout, folder: Path) -> None:
    engine = engine_of(world, config, layout)
    step(engine, 0)
    write_shards(folder, world.rank, trainer_state(engine))


def resumed(world: World, config: DecoderConfig, layout: UpdateLayout, folder: Path) -> dict[str, Tensor]:
    engine = engine_of(world, config, layout)
    load_trainer_state(engine, ShardFiles(folder))
    step(engine, 1)
    return {name: weight.clone() for name, weight in whole_weights(engine).items()}


@pytest.mark.ranks
def test_a_checkpoint_goes_on_in_another_layout_to_the_bit(world: World, tmp_path: Path) -> None:
    expected = stepped(world, SPARSE, UpdateLayout(), (0, 1))
    run_ranks(2, save_after_one_step, SPARSE, UpdateLayout(shard=2, expert=2), tmp_path)
    found = [resumed(world, SPARSE, UpdateLayout(), tmp_path)]
    found += run_ranks(2, resumed, SPARSE, UpdateLayout(shard=1, tensor=2), tmp_path)
    for weights in found:
        assert all(torch.equal(weights[name], weight) for name, weight in expected.items())
