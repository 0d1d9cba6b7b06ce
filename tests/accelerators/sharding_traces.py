"""FSDP2 on a fake CUDA device: one of several ranks wraps, gathers, computes, reduces, clips and steps."""

from __future__ import annotations

import torch

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.training.packed_rows import TokenRows
from spmdrl.engines.training.training_engine import LossFunction, TrainingEngine
from spmdrl.nouns.settings.training_config import OptimConfig, TrainingConfig
from spmdrl.resources.device import Device
from spmdrl.resources.layout import UpdateLayout, fit_update_layout
from spmdrl.resources.mesh import build_update_mesh
from tests.accelerators.fake_cuda import FakeCuda

NUM_RANKS = 4
# Below the norm that the device's zeros have, so that gradients are clipped.
CLIPPED = OptimConfig(lr=1e-3, max_grad_norm=1e-12)


def sharded_update(
    cuda: FakeCuda, *, config: DecoderConfig, layout: UpdateLayout, rows: TokenRows, loss: LossFunction
) -> None:
    """An update of the first rank in bfloat16; weights and means are its float32 shards."""
    device = Device(cuda.device.type)
    layout = fit_update_layout(layout, NUM_RANKS)
    engine = TrainingEngine(config, TrainingConfig(max_steps=2), CLIPPED, build_update_mesh(layout, device, 0), device)
    before = cuda.operators["aten::_foreach_mul_"]
    result = engine.update(rows, loss)
    assert not result.skipped and result.num_microbatches == 1
    shards = engine.named_shards()
    assert cuda.operators["aten::_foreach_mul_"] - before == 1, cuda.operators
    means = [mean for kinds in engine.optimizer_state().values() for mean in kinds.values()]
    for tensor in (*means, *(shard.tensor for shard in shards.values())):
        assert (tensor.dtype, tensor.device) == (torch.float32, cuda.device), tensor
    for collective in ("_allgather_base_", "_reduce_scatter_base_"):
        assert cuda.operators[f"c10d::{collective}"] > config.num_layers, cuda.operators
    assert bool(cuda.operators["c10d::allreduce_"]) == (layout.data > 1), cuda.operators
    assert cuda.operators["aten::_fused_adamw_"], cuda.operators
