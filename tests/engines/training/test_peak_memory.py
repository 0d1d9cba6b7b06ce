"""No rank ever holds much more than its share: measured as resident memory of 4 ranks with 84M parameters."""

from __future__ import annotations

import gc
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from spmdrl.engines.models.hf.model_weights import WeightFiles, write_weights
from spmdrl.engines.models.make_model import RandomWeights
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.settings.training_config import OptimConfig, TrainingConfig
from spmdrl.resources.layout import UpdateLayout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World
from tests.bench.memory.memory_ranks import give_freed_blocks_back
from tests.engines.training.tiny import CONFIG, make_engine, make_rows, weighted_nll
from tests.support.ranks import run_ranks

NUM_RANKS = 4
MIB = 1 << 20
LARGE = replace(
    CONFIG,
    vocab_size=16000,
    hidden_size=1024,
    intermediate_size=2816,
    num_layers=4,
    num_heads=16,
    num_kv_heads=16,
    head_size=64,
    qk_norm=False,
)


# What stands outside of the layers: embedding, final norm and head, each more than a layer.
BLOCK = 4 * (2 * LARGE.vocab_size + 1) * LARGE.hidden_size
# A layer that is gathered ahead, activations, and what the allocator keeps.
ALLOWANCE = 64 * MIB


@dataclass(frozen=True)
class Peaks:
    """Bytes of one rank, above those resident before the engine was built."""

    load: int
    update: int
    after: int
    """what stays resident after the update"""
    weights: int
    """its shards of the weights; gradients are as large, and the optimizer's two means twice"""


def _write_weights(world: World, folder: Path) -> None:
    weights = RandomWeights(LARGE, seed=0)
    write_weights(folder, ((name, weights(name)) for name in weights.names))


def _measure(world: World, folder: Path) -> Peaks:
    give_freed_blocks_back()
    # What the first update of any model allocates for good is not counted.
    make_engine(world).update(make_rows(), weighted_nll)
    gc.collect()
    before = reset_peak()
    mesh = build_update_mesh(UpdateLayout(shard=world.size), world.device, world.rank)
    engine = TrainingEngine(LARGE, TrainingConfig(), OptimConfig(), mesh, world.device, compute_dtype=torch.float32)
    engine.load(WeightFiles(folder))
    load = status("VmHWM") - before
    reset_peak()
    engine.update(make_rows(num_rows=2), weighted_nll)
    update = status("VmHWM") - before
    weights = sum(shard.tensor.nbytes for shard in engine.named_shards().values())
    return Peaks(load, update, status("VmRSS") - before, weights)


def reset_peak() -> int:
    """Let the kernel count the peak from now on, and return what is resident."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(name: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) << 10


@pytest.mark.cpu_only(reason="it measures resident memory of the host")
@pytest.mark.ranks
@pytest.mark.slow
def test_no_rank_exceeds_its_share_and_one_unsharded_block(tmp_path: Path):
    run_ranks(1, _write_weights, tmp_path)
    try:
        ranks = run_ranks(NUM_RANKS, _measure, tmp_path, timeout=300)
    finally:
        # 340 MB, which pytest would keep.
        shutil.rmtree(tmp_path)
    for found in ranks:
        print({name: f"{num_bytes / MIB:.0f} MiB" for name, num_bytes in vars(found).items()})
        weights, gradients, optimizer = found.weights, found.weights, 2 * found.weights
        # Pages of the files stay mapped while they are read: those of this rank's slices, and some beside them.
        assert found.load < 2 * weights + optimizer + BLOCK
        # One block, its weights and its unreduced gradient.
        assert found.update < weights + gradients + optimizer + 2 * BLOCK
        assert found.after < weights + optimizer + ALLOWANCE
