"""Estimates of a run from its config alone: bytes by owner and rank, tokens, samples, passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from spmdrl.dataflow.resharding.planning.slice_layouts import (
    fitted_stride,
    generation_slices,
    parameter_table,
    update_slices,
)
from spmdrl.dataflow.samples.balancing.balance import most_groups_each
from spmdrl.engines.generation.native.paged import block_bytes_of
from spmdrl.engines.generation.native.row_memory import bytes_of
from spmdrl.engines.generation.native.scheduler import planned_blocks
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.model_folder import compute_dtype
from spmdrl.engines.models.lora import is_adapter
from spmdrl.engines.models.mixers import StateKind
from spmdrl.engines.training.updater import means_bytes
from spmdrl.job.model.replica import generation_engine_name, groups_at_once
from spmdrl.job.run.run_folder import num_parameters, num_trained
from spmdrl.job.start.checked_run import TRAINED, CheckedRun
from spmdrl.job.start.prepared import Prepared
from spmdrl.nouns.batch import WeightSlice
from spmdrl.nouns.roles import POLICY, Role
from spmdrl.observability.terminal.units import bytes_text, count
from spmdrl.runtime.launch import LaunchEnvironment

_FLOAT32_BYTES = 4


def rank_bytes(
    checked: CheckedRun, decoders: Mapping[Role, DecoderConfig], launch: LaunchEnvironment, device_kind: str
) -> dict[str, int]:
    """Return the fullest rank's bytes, by owner in the memory ledger; weights exactly as the engines cut them.

    The KV cache holds whole responses, as the native engine lays it out. Activations, the switch's bucket
    (`reshard.bucket_bytes`) and the libraries' own memory come on top.
    """
    config, policy = checked.config, decoders[POLICY]
    computed, held = compute_dtype(config.model, device_kind).itemsize, dict[str, int]()
    for role, decoder in decoders.items() if checked.verb in TRAINED else ():
        table = parameter_table(decoder)
        if role.engine == "generation":
            cuts = [generation_slices(table, checked.judge_layout, rank) for rank in range(launch.world_size)]
            held[role.weights] = _most_elements(cuts) * computed
            continue
        layout = checked.layout_of(role)
        slices = [update_slices(table, layout, rank) for rank in range(layout.num_ranks)]
        if role.optimizer is None:
            held[role.weights] = _most_elements(slices) * computed
            continue
        num_trained = _most_elements(slices, decoder.updates)
        held[role.weights] = num_trained * _FLOAT32_BYTES
        if role.base is not None and decoder.lora is not None:
            held[role.base] = _most_elements(slices, lambda name: not policy.updates(name)) * computed
        # One model is updated at a time.
        held["gradients"] = max(held.get("gradients", 0), num_trained * _FLOAT32_BYTES)
        each = {name: decoder.updates(name) * means_bytes(checked.optim_of(role), name) for name in table.rules}
        held[role.optimizer] = _most_elements(slices, each.__getitem__)
    if checked.offline is None or (checked.verb == "sft" and checked.eval_rows):
        held["generation_weights"] = _most_elements(_generated(checked, policy, launch, device_kind)) * computed
        num_generating = len(checked.sets_of(launch.world_size)[1])
        held["kv_cache"] = bytes_of(*_cache_blocks(checked, policy, num_generating, device_kind))
    return held


def _generated(
    checked: CheckedRun, policy: DecoderConfig, launch: LaunchEnvironment, device_kind: str
) -> list[list[WeightSlice]]:
    """Return the slices that each rank generates with."""
    config, lora = checked.config, policy.lora
    if lora is not None and (lora.merge or generation_engine_name(config.rollout, device_kind) == "vllm"):
        policy = replace(policy, lora=None)
    table = parameter_table(policy)
    updating, generating = checked.sets_of(launch.world_size)
    layout = config.resources.generation
    if updating == generating:
        layout = fitted_stride(table, checked.layout, layout, launch.local_world_size)
    return [generation_slices(table, layout, place) for place in range(len(generating))]


def _kept_bytes(checked: CheckedRun, policy: DecoderConfig, launch: LaunchEnvironment, device_kind: str) -> int:
    """Return the bytes that generation keeps during updates: with adapters, the frozen weights."""
    slices = _generated(checked, policy, launch, device_kind)
    if not any(is_adapter(box.name) for box in slices[0]):
        return 0
    num_elements = _most_elements(slices, lambda name: not is_adapter(name))
    return num_elements * compute_dtype(checked.config.model, device_kind).itemsize


def _most_elements(slices_of_ranks: Iterable[Sequence[WeightSlice]], of: Callable[[str], int] = lambda name: 1) -> int:
    """Count elements of the weights, each `of` times, on the rank that holds most of them."""
    return max(sum(box.num_elements * of(box.name) for box in slices) for slices in slices_of_ranks)


def _cache_blocks(
    checked: CheckedRun, decoder: DecoderConfig, num_ranks: int, device_kind: str
) -> tuple[list[int], dict[StateKind, int]]:
    """Return the blocks of each kind of state on the fullest rank, and the bytes of one."""
    config, rollout, layout = checked.config, checked.config.rollout, checked.config.resources.generation
    dtype = compute_dtype(config.model, device_kind)
    states = [mixer.state(layout.tensor) for mixer in decoder.mixers]
    block_bytes = block_bytes_of(states, rollout.block_size, dtype)
    num_tokens = min(config.data.max_prompt_length + rollout.max_completion_length, decoder.max_positions)
    num_replicas = num_ranks // layout.tensor
    num_held_out = sum(len(part.rows) for part in checked.eval_rows)
    num_held_out = min(num_held_out, config.eval.max_rows or num_held_out)
    batches = [(-(-num_held_out // num_replicas), config.eval.num_samples)] if num_held_out else []
    if checked.offline is None and checked.verb in TRAINED:
        num_prompts = rollout.prompts_per_step + rollout.extra_prompts
        batches.append((most_groups_each(num_prompts, num_replicas), rollout.num_generations))
    plans = [
        planned_blocks(block_bytes, rollout, **groups_at_once(config, *batch), num_tokens=num_tokens)
        for batch in batches
    ]
    return max(plans, key=lambda blocks: bytes_of(blocks, block_bytes)), block_bytes


def _noun(kind: StateKind, block_size: int) -> str:
    if kind.is_slot:
        return "slots of recurrent states"
    return f"blocks of {block_size} positions" + ("" if kind.window is None else f" in windows of {kind.window}")


def needed_bytes(checked: CheckedRun, prepared: Prepared, launch: LaunchEnvironment, device_kind: str) -> int:
    """Return the least memory of the fullest rank; a KV cache without a set size takes the rest."""
    owners = rank_bytes(checked, _decoders(prepared), launch, device_kind)
    if checked.config.rollout.kv_cache_gib is None:
        owners.pop("kv_cache", None)
    phases = _phases(owners, checked, prepared, launch, device_kind)
    updating, generating = checked.sets_of(launch.world_size)
    return sum(phases) if checked.config.reshard.swap == "never" and updating == generating else max(phases)


def _decoders(prepared: Prepared) -> dict[Role, DecoderConfig]:
    return {role: source.decoder for role, source in prepared.sources.items()}


def _phases(
    owners: Mapping[str, int], checked: CheckedRun, prepared: Prepared, launch: LaunchEnvironment, device_kind: str
) -> tuple[int, int]:
    """Return bytes for update and generation, of those that `owners` hold."""
    generating = owners.get("generation_weights", 0) + owners.get("kv_cache", 0)
    updating = sum(owners.values()) - generating
    if updating and generating and len(set(checked.sets_of(launch.world_size))) == 1:
        updating += _kept_bytes(checked, prepared.source.decoder, launch, device_kind)
    return updating, generating


def estimate_lines(
    checked: CheckedRun, prepared: Prepared, launch: LaunchEnvironment, device_kind: str
) -> Iterator[str]:
    """Yield the estimates as text."""
    config, rollout, decoders = checked.config, checked.config.rollout, _decoders(prepared)
    owners = rank_bytes(checked, decoders, launch, device_kind)
    dtype = str(compute_dtype(config.model, device_kind)).removeprefix("torch.")
    num_elements = num_parameters(decoders[POLICY])
    trained = num_trained(decoders[POLICY])
    lora = f"; lora trains {count(trained)} beside them" if decoders[POLICY].lora is not None else ""
    yield f"model: {count(num_elements)} parameters ({num_elements}), computed in {dtype} on {device_kind}{lora}"
    named = {owner: f"{owner.replace('_', ' ')} {bytes_text(size)}" for owner, size in owners.items() if size}
    if "kv_cache" in owners:
        num_generating = len(checked.sets_of(launch.world_size)[1])
        blocks, sizes = _cache_blocks(checked, decoders[POLICY], num_generating, device_kind)
        pools = (f"{num} {_noun(kind, rollout.block_size)}" for num, kind in zip(blocks, sizes, strict=True))
        named["kv_cache"] += f" ({', '.join(pools)})"
    yield f"bytes per rank, at most: {', '.join(named.values())}"
    updating, generating = _phases(owners, checked, prepared, launch, device_kind)
    yield (
        f"together: {bytes_text(updating)} to update, {bytes_text(generating)} to generate; weights, gradients and "
        "optimizer exactly, the KV cache as the native engine would fill it; activations come on top"
    )
    if prepared.train_prompts is None:
        return
    prompts, drawn = prepared.prompts, checked.num_steps * checked.rows_per_step
    epochs = f"{checked.num_steps} steps, {drawn} prompts = {drawn / len(prompts):.3g} epochs of {len(prompts)} rows"
    if checked.offline is not None:
        yield f"the run: {epochs}, {checked.rows_per_step} per step"
        return
    samples = rollout.prompts_per_step * rollout.num_generations
    longest = prompts.mean_length + rollout.max_completion_length
    yield (
        f"a step: {rollout.prompts_per_step} prompts x {rollout.num_generations} responses = {samples} samples, at "
        f"most {count(samples * longest)} tokens ({prompts.mean_length:.1f} of a prompt on average, up to "
        f"{rollout.max_completion_length} of a response)"
    )
    yield (f"the run: {epochs}, {drawn * rollout.num_generations} samples, {config.train.num_updates} optimizer steps")
