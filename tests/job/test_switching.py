"""The switch with real engines: what is on the device, and what this process really holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.ranks import run_ranks

from spmdrl.dataflow.resharding.flow import ReshardingFlow
from spmdrl.dataflow.resharding.gather import ReshardConfig
from spmdrl.engines.generation.native import NativeEngine
from spmdrl.engines.generation.protocol import RolloutConfig
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.weights import random_weights
from spmdrl.engines.training.engine import TrainingConfig, TrainingEngine
from spmdrl.engines.training.optimizer import OptimConfig
from spmdrl.engines.training.rows import LossTerms, TokenRows
from spmdrl.resources.layout import UpdateLayout
from spmdrl.resources.memory import MemoryLedger, release_to_system, resident_bytes
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World
from spmdrl.types import offsets_of

MIB = 2**20
AWAY = ("update_weights", "gradients", "optimizer")

FIFTY_MILLION = DecoderConfig(
    model_type="qwen3", vocab_size=1024, hidden_size=768, intermediate_size=2304, num_layers=8, num_heads=12,
    num_kv_heads=4, head_size=64, rms_eps=1e-6, rope_theta=10000.0, qk_norm=True, attention_bias=False,
    tied_head=True, max_positions=128,
)  # fmt: skip


def rows() -> TokenRows:
    tokens = torch.arange(48) % 100
    return TokenRows(tokens, offsets_of([16, 16, 16]), torch.tensor([4, 4, 4]))


def likelihood(scores, micro):
    return LossTerms(-scores.logprobs_R.mean(), {})


def switch_and_measure(world: World, directory: str) -> dict[str, object]:
    mesh = build_update_mesh(UpdateLayout(1, world.size), world.device, world.rank)
    trainer = TrainingEngine(FIFTY_MILLION, TrainingConfig(), OptimConfig(lr=1e-3), mesh, world.device)
    trainer.load(random_weights(FIFTY_MILLION, 0))
    generator = NativeEngine(FIFTY_MILLION, RolloutConfig(), torch.device("cpu"), torch.float32)
    ledger = MemoryLedger()
    flow = ReshardingFlow(world, trainer, generator, None, ReshardConfig(verify=True), ledger, Path(directory))
    trainer.update(rows(), likelihood)
    flow.account()
    before = {name: shard.tensor.clone() for name, shard in trainer.named_shards().items()}
    means = [tensor.clone() for tensor in trainer.optimizer_tensors()]
    held_for_comparison = sum(t.nbytes for t in before.values()) + sum(t.nbytes for t in means)
    release_to_system()
    in_update, resident_in_update = ledger.snapshot("update").device, resident_bytes()
    flow.to_generation()
    in_generation, resident_in_generation = ledger.snapshot("generation").device, resident_bytes()
    flow.start_return()
    flow.to_update()
    after = trainer.named_shards()
    same = all(torch.equal(before[name], after[name].tensor) for name in before)
    same = same and all(torch.equal(a, b) for a, b in zip(means, trainer.optimizer_tensors(), strict=True))
    result = trainer.update(rows(), likelihood)
    back = ledger.snapshot("update").device
    flow.close()
    return {
        "update": dict(in_update), "generation": dict(in_generation), "back": dict(back), "same": same,
        "freed": resident_in_update - resident_in_generation, "goes_on": not result.skipped,
        "state": held_for_comparison,
    }  # fmt: skip


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_update_state_is_off_the_device_and_out_of_resident_memory_during_generation(tmp_path, num_ranks):
    for seen in run_ranks(num_ranks, switch_and_measure, str(tmp_path), timeout=120):
        assert seen["update"]["update_weights"] + seen["update"]["optimizer"] == pytest.approx(seen["state"], rel=0.01)
        assert seen["state"] > 550 * MIB / num_ranks
        assert [seen["generation"][owner] for owner in AWAY] == [0, 0, 0]
        generation = seen["generation"]["generation_weights"] + seen["generation"]["kv_cache"]
        assert generation > 190 * MIB
        # What left, less what generation took in its place.
        assert seen["freed"] == pytest.approx(seen["state"] - generation, abs=0.05 * seen["state"])
        assert seen["same"], "weights and optimizer come back bit for bit"
        assert seen["goes_on"] and seen["back"] == seen["update"]
