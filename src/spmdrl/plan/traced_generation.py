"""The native engine of one rank on a planned device: what it holds, and its first steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from spmdrl.dataflow.samples.balancing.balance import most_groups_each
from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.generation.native.running_rows import ChoiceRecorder
from spmdrl.engines.generation.protocol import Request
from spmdrl.engines.models.hf.model_folder import compute_dtype
from spmdrl.job.model.model_source import ModelSource
from spmdrl.job.model.replica import engine_decoder
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.plan.account import TRANSIENT, Account, Span
from spmdrl.plan.planned_device import set_memory
from spmdrl.plan.planned_rows import RowLengths
from spmdrl.resources.mesh import build_generation_mesh
from spmdrl.resources.world import World

# Steps that fill prompts, at most, and those that decode.
_MOST_STEPS = 3


def trace_generation(
    checked: CheckedRun, source: ModelSource, world: World, account: Account, lengths: RowLengths, *,
    total_bytes: int, kept_bytes: int,
) -> tuple[Counter[str], Span]:  # fmt: skip
    """Wake the native engine of a rank that generates beside `kept_bytes` of other owners, and run its first steps.

    Returns the bytes that it holds, by owner. Raises NoRoom.
    """
    config = checked.config
    _, generating = checked.sets_of(world.size)
    layout = config.resources.generation
    layout = replace(layout, tensor_stride=layout.tensor_stride or 1)
    mesh = build_generation_mesh(layout, world.device, len(generating), world.rank, first=generating[0])
    dtype = compute_dtype(config.model, world.device.kind)
    records = config.train.routing.replay == "rollout" and source.decoder.moe is not None
    with account.own("generation_weights"):
        engine = NativeEngine(
            engine_decoder(source), config.rollout, world.device.torch_device, dtype, mesh=mesh,
            recorder=ChoiceRecorder() if records else None,
        )  # fmt: skip
        engine.wake_weights()
    num_groups = most_groups_each(config.rollout.prompts_per_step + config.rollout.extra_prompts, len(mesh.replicas))
    size, vocab_size = config.rollout.num_generations, source.decoder.vocab_size
    sampling = config.rollout.sampling(())
    requests = [
        Request(
            tuple(range(group * size, group * size + size)),
            tuple((group * 31 + place) % vocab_size for place in range(lengths.prompt)),
            tuple(range(size)),
            sampling,
        )
        for group in range(min(num_groups, config.rollout.max_running_rows))
    ]
    set_memory(total_bytes - kept_bytes - account.held["generation_weights"], total_bytes)
    with account.own("kv_cache"):
        try:
            engine.wake_cache()
            engine.submit(requests)
        except ValueError as error:
            raise NoRoom(str(error)) from error
    held = Counter({owner: account.held[owner] for owner in ("generation_weights", "kv_cache")})
    with account.span(lambda owner: owner not in TRANSIENT) as span:
        for _ in range(_MOST_STEPS):
            engine.step()
        engine.abort()
    return held, span


class NoRoom(ValueError):
    """Too little memory for the KV cache of one row."""
