"""A generator with constant weights, such as a judge's."""

from __future__ import annotations

from dataclasses import replace

from spmdrl.config.config import Config
from spmdrl.engines.generation.frozen_generator import FrozenGenerator
from spmdrl.engines.models.hf.model_folder import compute_dtype
from spmdrl.job.model.model_source import ModelSource
from spmdrl.job.model.replica import text_arguments
from spmdrl.resources.memory import MemoryLedger, Owner
from spmdrl.resources.mesh import GenerationMesh
from spmdrl.resources.world import World


def build_frozen_generator(
    config: Config, source: ModelSource, world: World, ledger: MemoryLedger, *,
    mesh: GenerationMesh, owner: Owner, kv_cache_gib: float,
) -> FrozenGenerator:  # fmt: skip
    """Return a native engine with this rank's weights from the source's files, asleep, with the given cache size."""
    from spmdrl.engines.generation.native.native_engine import NativeEngine

    device = world.device
    rollout = replace(
        config.rollout, stop=(), engine_kwargs={}, cuda_graphs=False,
        kv_cache_gib=None if device.is_cpu else kv_cache_gib,
    )  # fmt: skip
    dtype = compute_dtype(config.model, device.kind)
    text = text_arguments(rollout, source)
    engine = NativeEngine(source.decoder, rollout, device.torch_device, dtype, mesh=mesh, **text)
    files, asleep = source.weights(), engine.wake_weights(())
    weights = {
        name: files.read(wanted).to(asleep[name].dtype).contiguous() for name, wanted in engine.weight_slices().items()
    }
    return FrozenGenerator(engine, weights, device, ledger, owner)
