"""What a run will hold and do, computed from its config alone: bytes by owner and rank, tokens, samples, passes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from spmdrl.config.config import Config
from spmdrl.dataflow.data.prompts import PromptSource
from spmdrl.dataflow.resharding.planning.slice_layouts import (
    fitted_stride,
    generation_slices,
    parameter_table,
    update_slices,
)
from spmdrl.engines.generation.native.cache.paged import CacheShape
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.model_folder import parameter_shapes
from spmdrl.job.start.start_checks import CheckedRun
from spmdrl.observability.terminal.units import bytes_text, count
from spmdrl.resources.startup.launch import LaunchEnvironment
from spmdrl.types import WorkerState

_FLOAT32_BYTES = 4
# AdamW's two moments, in float32.
_OPTIMIZER_BYTES = 8


@dataclass(frozen=True)
class RankBytes:
    """What the fullest rank holds for each owner, at most."""

    update_weights: int
    gradients: int
    optimizer: int
    reference_weights: int
    generation_weights: int
    kv_cache: int


def rank_bytes(checked: CheckedRun, decoder: DecoderConfig, launch: LaunchEnvironment, device_kind: str) -> RankBytes:
    """Bytes of the rank that has most of each; weights exactly as the engines cut them.

    The KV cache is of whole responses, as the native engine lays it out. Activations, the switch's bucket
    (`reshard.bucket_bytes`) and the libraries' own memory come on top.
    """
    config, table = checked.config, parameter_table(decoder)
    layout = fitted_stride(table, checked.layout, config.resources.generation, launch.local_world_size)
    ranks = range(launch.world_size)
    held = max(sum(box.num_elements for box in update_slices(table, checked.layout, rank)) for rank in ranks)
    wanted = max(sum(box.num_elements for box in generation_slices(table, layout, rank)) for rank in ranks)
    computed = config.model.compute_dtype(device_kind).itemsize
    return RankBytes(
        update_weights=held * _FLOAT32_BYTES,
        gradients=held * _FLOAT32_BYTES,
        optimizer=held * _OPTIMIZER_BYTES,
        reference_weights=held * computed if WorkerState.REFERENCE in checked.needs else 0,
        generation_weights=wanted * computed,
        kv_cache=_cache_bytes(config, decoder, launch.world_size, device_kind),
    )


def _cache_bytes(config: Config, decoder: DecoderConfig, num_ranks: int, device_kind: str) -> int:
    rollout, layout = config.rollout, config.resources.generation
    if rollout.kv_cache_gib is not None:
        return int(rollout.kv_cache_gib * 2**30)
    shape = CacheShape(
        num_layers=decoder.num_layers,
        block_size=rollout.block_size,
        num_kv_heads=decoder.num_kv_heads // min(decoder.num_kv_heads, layout.tensor),
        head_size=decoder.head_size,
        value_head_size=decoder.value_head_size,
        dtype=config.model.compute_dtype(device_kind),
    )
    num_tokens = min(config.data.max_prompt_length + rollout.max_completion_length, decoder.max_positions)
    num_rows = (rollout.prompts_per_step + rollout.extra_prompts) * rollout.num_generations
    rows_each = min(-(-num_rows // (num_ranks // layout.tensor)), rollout.max_running_rows)
    # One more each, as a row may have to copy the block that it shares with its siblings.
    return rows_each * (-(-num_tokens // rollout.block_size) + 1) * shape.block_bytes


def estimate_lines(
    checked: CheckedRun, decoder: DecoderConfig, prompts: PromptSource, launch: LaunchEnvironment, device_kind: str
) -> Iterator[str]:
    """The estimates as text."""
    config, rollout = checked.config, checked.config.rollout
    num_parameters = sum(math.prod(shape) for shape in parameter_shapes(decoder).values())
    owners = rank_bytes(checked, decoder, launch, device_kind)
    dtype = str(config.model.compute_dtype(device_kind)).removeprefix("torch.")
    yield f"model: {count(num_parameters)} parameters ({num_parameters}), computed in {dtype} on {device_kind}"
    named = {owner.replace("_", " "): num_bytes for owner, num_bytes in vars(owners).items() if num_bytes}
    yield "bytes a rank, at most: " + ", ".join(f"{owner} {bytes_text(size)}" for owner, size in named.items())
    updating = owners.update_weights + owners.gradients + owners.optimizer + owners.reference_weights
    generating = owners.generation_weights + owners.kv_cache
    yield (
        f"together: {bytes_text(updating)} to update, {bytes_text(generating)} to generate; weights, gradients and "
        "optimizer exactly, the KV cache as the native engine would fill it; activations come on top"
    )
    samples = rollout.prompts_per_step * rollout.num_generations
    longest = prompts.mean_length + rollout.max_completion_length
    yield (
        f"a step: {rollout.prompts_per_step} prompts x {rollout.num_generations} responses = {samples} samples, at "
        f"most {count(samples * longest)} tokens ({prompts.mean_length:.1f} of a prompt on average, up to "
        f"{rollout.max_completion_length} of a response)"
    )
    drawn = config.train.max_steps * rollout.prompts_per_step
    yield (
        f"the run: {config.train.max_steps} steps, {drawn} prompts = {drawn / len(prompts):.3g} epochs of "
        f"{len(prompts)} rows, {drawn * rollout.num_generations} samples, {config.train.num_updates} optimizer steps"
    )
