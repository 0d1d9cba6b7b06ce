"""A job's plan in a few lines at its start."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from spmdrl.algorithms.settings.algo_config import AlgoConfig
from spmdrl.config.given import inline
from spmdrl.engines.models.hf.model_folder import compute_dtype
from spmdrl.job.model.replica import generation_engine_name
from spmdrl.job.run.run_folder import num_parameters, num_trained
from spmdrl.job.start.checked_rows import unread_columns
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.job.start.prepared import Prepared
from spmdrl.nouns.settings.rollout_config import RolloutConfig
from spmdrl.nouns.settings.training_config import OptimConfig
from spmdrl.observability.terminal.console import Console
from spmdrl.observability.terminal.units import count
from spmdrl.resources.world import World


def print_banner(checked: CheckedRun, prepared: Prepared, world: World, console: Console) -> None:
    """Print the lines of a training run on the main rank."""
    for line in _lines(checked, prepared, world) if world.is_main else ():
        console.note(line)


def _lines(checked: CheckedRun, prepared: Prepared, world: World) -> Iterator[str]:
    config, source, prompts = checked.config, prepared.source, prepared.prompts
    files, model = source.weights(), count(num_parameters(source.decoder))
    stored, computed = files.main_dtype, str(compute_dtype(config.model, world.device.kind)).removeprefix("torch.")
    stops = ", ".join(map(str, prepared.tokenizer.stop_tokens))
    yield (
        f"model  {source.folder}{' (random weights)' if config.model.make is not None else ''} | "
        f"{model} parameters | stored {stored}, computed {computed} | stops at {stops}"
    )
    if files.left_out:
        names = ", ".join(f"{number} of {start}*" for start, number in files.left_out.items())
        yield f"NOTE: weights of other parts than the decoder are neither trained nor saved: {names}"
    ranks = f"{world.size} rank{'s'[: world.size > 1]} on {world.num_nodes} node{'s'[: world.num_nodes > 1]}"
    device, generation = world.device, config.resources.generation
    threads = torch.get_num_threads()
    name = f"cpu, {threads} thread{'s'[: threads > 1]} each" if device.is_cpu else device.module.get_device_name()
    updating, generating = checked.sets_of(world.size)
    replicas = len(generating) // generation.tensor
    update = "whole on each rank" if str(checked.layout) == "1" else str(checked.layout)
    if updating != generating:
        update += " on rank 0" if len(updating) == 1 else f" on ranks 0 to {updating[-1]}"
    update += "".join(f", {role.name} {layout}" for role, layout in checked.own_layouts.items())
    judge = "" if str(checked.judge_layout) == "1" else f", judge {checked.judge_layout}"
    cut = "" if str(generation) == "1" else f"{generation} x "
    engine = generation_engine_name(config.rollout, device.kind)
    yield (
        f"ranks  {ranks} | {name} | update {update} | "
        f"generation {cut}{replicas} replica{'s'[: replicas > 1]}{judge} | engine {engine}"
    )
    if (lora := source.decoder.lora) is not None:
        trained, scale = num_trained(source.decoder), f"{lora.alpha:g} / {lora.rank}"
        yield (
            f"lora   {count(trained)} parameters are trained, {trained / num_parameters(source.decoder):.2%} of the "
            f"model's | scale {scale} | {', '.join(lora.targets) or 'all projections'}"
        )
    rows_per_step = checked.rows_per_step
    if checked.offline is not None:
        step = f"{rows_per_step} rows per step"
    else:
        samples = rows_per_step * config.rollout.num_generations
        step = f"{rows_per_step} prompts x {config.rollout.num_generations} responses = {samples} samples per step"
    yield (
        f"data   {len(prompts)} rows | {step} | {checked.num_steps} steps = "
        f"{checked.num_steps * rows_per_step / max(len(prompts), 1):.3g} passes over the rows"
    )
    if (rounds := config.rollout.partial_max_rounds) > 1 and checked.verb == "train":
        yield (
            f"rollout.partial_max_rounds {rounds}: which prompts a step trains depends on the number of replicas "
            f"({replicas} here); the same number repeats a run exactly, another trains as many"
        )
    if checked.verb == "train":
        yield f"algo   {_algorithm(config.algo)}"
        values = {name: getattr(config.rollout, name) for name in ("top_p", "top_k", "min_p")}
        # Their defaults keep all tokens.
        if filters := [f"rollout.{key}={one}" for key, one in values.items() if one != getattr(RolloutConfig, key)]:
            yield f"NOTE: log-probs are trained as they are without {', '.join(filters)}, by which tokens are sampled"
    yield f"optim  {_learnt(checked)}, {'all weights' if config.lora is None else 'adapters'}, {_rate(checked.optim)}"
    interval = config.checkpoint.interval
    saves = f"a checkpoint every {interval} steps and at the end" if interval else "a checkpoint at the end"
    yield f"run    {config.run.folder} | {checked.phase} | seed {config.seed} | {saves}"
    if columns := unread_columns(checked):
        yield f"NOTE: nothing reads the columns {', '.join(columns)} of the data"
    if stored != computed:
        yield (
            f"NOTE: the weights are stored in {stored} and computed in {computed} "
            f"(model.dtype={config.model.dtype} on {world.device.kind}); model.dtype sets it"
        )


def _learnt(checked: CheckedRun) -> str:
    """Describe the objective, the trained weights and the learning rate."""
    pairs = checked.config.preferences
    of_pairs = f"DPO on pairs, loss {pairs.loss_type}, beta {pairs.beta:g}"
    of_verb = {"sft": "supervised", "preferences": of_pairs, "reward-model": "scores of pairs"}
    return of_verb.get(checked.verb, "rewards")


def _rate(config: OptimConfig) -> str:
    warm_up = f", {config.warmup_steps} steps of warm-up" if config.warmup_steps else ""
    warm_up = f", {config.warmup_ratio:.3g} of all steps warm-up" if config.warmup_ratio else warm_up
    name = "" if config.name == "adamw" else f"{config.name}, "
    return f"{name}lr {config.lr:g} ({config.schedule}{warm_up})"


def _algorithm(config: AlgoConfig) -> str:
    changed = [f"{key} {inline(value)} ({inline(default)})" for key, (value, default) in config.changed.items()]
    return f"{config.name} | {', '.join(changed) if changed else 'its defaults; spmdrl explain lists them'}"
