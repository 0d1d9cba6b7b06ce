"""Checks of a model against the layouts and options of a run; they need no communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from spmdrl.config.config import Config
from spmdrl.engines.generation.native.graph_steps import wants_graphs
from spmdrl.engines.models.decoder import Decoder, DecoderConfig
from spmdrl.engines.models.hf.model_folder import ignored_attn_factor, quantization_of, read_config
from spmdrl.engines.models.make_model import decoder_config
from spmdrl.engines.models.rope_scaling import YarnScaling
from spmdrl.engines.parallel.expert_parallel import check_expert_parallel
from spmdrl.engines.parallel.tensor_parallel import check_tensor_parallel
from spmdrl.engines.training.parallelize import check_layout
from spmdrl.engines.training.routers import check_routing
from spmdrl.job.start.checked_run import TRAINED, CheckedRun, Verb
from spmdrl.nouns.roles import POLICY, ROLES, Role
from spmdrl.nouns.settings.model_sizes import ClampedGate
from spmdrl.observability.trackers import check_backends
from spmdrl.resources.device import find_device
from spmdrl.resources.layout import GenerationLayout, UpdateLayout, check_generation_layout, fit_update_layout
from spmdrl.runtime.installed import how_to_install
from spmdrl.runtime.launch import LaunchEnvironment

# Their backward passes have two halves, each of which would recompute every layer.
_SPLIT_BACKWARD = ("zero_bubble", "zbv")
# Their classes in vLLM don't read tie_word_embeddings.
_UNTIED_IN_VLLM = ("deepseek_v3", "glm4_moe", "glm_moe_dsa", "gpt_oss", "qwen3_next")


def check_model_fits(config: Config, decoder: DecoderConfig, layout: UpdateLayout) -> None:
    """Refuse a model that can't be trained. Raises ValueError with the numbers, the relation and a way out."""
    check_layout(decoder, layout)
    check_routing(config.train.routing, decoder)
    if config.lora is not None:
        # Raises ValueError for targets that the model doesn't have.
        with torch.device("meta"):
            Decoder(replace(decoder, lora=config.lora))
        if config.train.routing.bias_update_rate > 0:
            raise ValueError(
                f"train.routing.bias_update_rate is {config.train.routing.bias_update_rate}, but with lora nothing of "
                "the model changes but adapters; set it to 0, or leave out lora"
            )
    check_recomputing(config, layout)


def _check_role_fits(checked: CheckedRun, role: Role, decoder: DecoderConfig) -> None:
    """Refuse a model beside the policy that its layout can't cut. Raises ValueError."""
    layout, key = checked.layout_of(role), checked.layout_key(role)
    try:
        check_layout(decoder, layout, key)
    except ValueError as error:
        if role in checked.own_layouts:
            raise
        raise ValueError(f"for the {role.name}: {error}, or set {role.section}.layout") from None
    if role.is_trained:
        check_recomputing(checked.config, layout, key)


def check_models_beside(checked: CheckedRun, decoders: Mapping[Role, DecoderConfig]) -> None:
    """Refuse models beside the policy that their layouts can't cut. Raises ValueError."""
    for role, decoder in decoders.items():
        if role.engine == "generation":
            check_generation_cuts(decoder, checked.judge_layout, f"{role.section}.layout")
        elif role is not POLICY:
            _check_role_fits(checked, role, decoder)


def check_recomputing(config: Config, layout: UpdateLayout, key: str = "resources.update") -> None:
    """Refuse a schedule that would recompute layers many times. Raises ValueError."""
    recomputes = config.train.activation_checkpointing != "none"
    if recomputes and layout.pipeline > 1 and layout.pipeline_schedule in _SPLIT_BACKWARD:
        raise ValueError(
            f"{key}.pipeline_schedule is {layout.pipeline_schedule}, which splits backward in two, and "
            f"train.activation_checkpointing is {config.train.activation_checkpointing}, so that every layer would be "
            "run again many times; set pipeline_schedule to 1f1b or interleaved, or activation_checkpointing to none"
        )


def check_generation_cuts(decoder: DecoderConfig, layout: GenerationLayout, key: str = "resources.generation") -> None:
    """Refuse a model that a generation layout, configured under `key`, can't cut. Raises ValueError."""
    check_tensor_parallel(decoder, layout.tensor, f"{key}.tensor")
    check_expert_parallel(decoder, layout.expert, f"{key}.expert")


def check_vllm(config: Config) -> None:
    """Refuse options that vLLM doesn't support. Raises ValueError."""
    layout, means = config.resources.generation, f"rollout.engine {config.rollout.engine} means vLLM here, which"
    if layout.expert > 1:
        raise ValueError(
            f"resources.generation.expert is {layout.expert}, but {means} cuts experts like other matrices; set it to "
            "1, or rollout.engine to native"
        )
    if layout.tensor_stride > 1:
        raise ValueError(
            f"resources.generation.tensor_stride is {layout.tensor_stride}, but {means} takes consecutive ranks; "
            "set it to 0 or 1, or rollout.engine to native"
        )
    if config.train.routing.replay == "rollout":
        raise ValueError(
            f"train.routing.replay is rollout, but {means} doesn't return the experts that tokens went to; set "
            "rollout.engine to native or train.routing.replay to none"
        )


def check_vllm_on(config: Config, ranks: Sequence[int], num_ranks: int) -> None:
    """Refuse vLLM on a part of the ranks. Raises ValueError."""
    if len(ranks) < num_ranks:
        raise ValueError(
            f"resources.ranks.generation is {len(ranks)}, but rollout.engine {config.rollout.engine} means vLLM here, "
            "which opens its groups over all ranks; set rollout.engine to native, or resources.ranks.generation to 0"
        )


def check_vllm_computes(folder: Path, decoder: DecoderConfig) -> None:
    """Refuse a model folder that vLLM computes differently from transformers and the trainer. Raises ValueError."""
    if decoder.tied_head and decoder.model_type in _UNTIED_IN_VLLM:
        raise ValueError(
            f"the model's head is its embedding, but vLLM gives a {decoder.model_type} a head of its own, which no "
            "weights would reach; give a model with tie_word_embeddings false, or set rollout.engine to native"
        )
    if decoder.model_type == "gpt_oss":
        _check_vllm_gpt_oss(decoder)
    if (quantization := quantization_of(folder)) is not None:
        raise ValueError(
            f"the weights in {folder} are quantized ({quantization.packing.method}), in which vLLM would keep them, "
            "while each step's come in 16 bits; give the unquantized weights, or set rollout.engine to native"
        )
    factor = ignored_attn_factor(folder)
    if factor not in (None, 1):
        raise ValueError(
            f"rope scaling in {folder / 'config.json'} has attn_factor {factor}, by which vLLM multiplies queries and "
            "keys, while transformers and the trainer leave it out; remove it from config.json, or set rollout.engine "
            "to native"
        )


def _check_vllm_gpt_oss(decoder: DecoderConfig) -> None:
    scaling, window, moe = decoder.rope_scaling, decoder.window, decoder.moe
    holds = {
        "yarn scaling without attention_factor and mscale": isinstance(scaling, YarnScaling)
        and scaling.attention_factor is scaling.mscale is None,
        "a window in every other layer": window is None or window.layers == tuple(range(0, decoder.num_layers, 2)),
        "swiglu_limit 7.0 and swiglu_alpha 1.702": moe is not None and moe.clamp == ClampedGate(7.0, 1.702),
    }
    if lacking := [part for part, holds_here in holds.items() if not holds_here]:
        raise ValueError(
            f"vLLM computes every gpt_oss with {' and '.join(lacking)}, which this model lacks; set rollout.engine to "
            "native"
        )


def check_batch_invariant(config: Config, layout: UpdateLayout, device_kind: str) -> None:
    """Refuse settings that prevent bitwise equality of generator and trainer. Raises ValueError with all reasons."""
    generation = config.resources.generation
    wanted: dict[str, tuple[object, object]] = {
        "resources.device": (device_kind, "cpu"),
        "model.dtype": (config.model.dtype, "float32"),
        "rollout.engine": (config.rollout.engine, "native"),
        "lora.merge": (str(config.lora is not None and config.lora.merge).lower(), "false"),
        "resources.update.tensor": (layout.tensor, 1),
        "resources.update.context": (layout.context, 1),
        "resources.update.expert": (layout.expert, 1),
        "resources.generation.tensor": (generation.tensor, 1),
        "resources.generation.expert": (generation.expert, 1),
    }
    # auto means float32 and the native engine on CPUs only.
    wrong = {key: pair for key, pair in wanted.items() if pair[0] not in (pair[1], "auto")}
    if wrong:
        values = ", ".join(f"{key} is {value}" for key, (value, _) in wrong.items())
        way_out = ", ".join(f"{key} to {value}" for key, (_, value) in wrong.items())
        raise ValueError(
            f"debug.batch_invariant is true, but {values}: sums over ranks or other blocks, other dtypes and other "
            f"engines round otherwise; set {way_out}, or debug.batch_invariant to false"
        )


def decoder_at_hand(config: Config) -> DecoderConfig | None:
    """Return the decoder of `model.make` or of a local model folder; None if it must be fetched first."""
    if config.model.make is not None:
        return decoder_config(config.model.make)
    folder = Path(config.model.path or "").expanduser()
    return read_config(folder) if (folder / "config.json").is_file() else None


def with_own_layouts(checked: CheckedRun) -> CheckedRun:
    """Fit the layouts of models that aren't cut like the policy. Raises ValueError for models that the run lacks."""
    fitted: dict[Role, UpdateLayout] = {}
    beside, world_size = checked.config.beside, checked.layout.num_ranks
    given = {role: section.layout for role in ROLES if (section := beside.get(role.name))}
    for role, layout in given.items():
        if layout is None:
            continue
        key = f"{role.section}.layout"
        if role not in checked.roles:
            raise ValueError(f"there is {key}, but this run has no {role.name} with weights of its own; leave it out")
        if checked.verb == "preferences":
            raise ValueError(
                f"there is {key}, but preferences rates the rows of a step with policy and {role.name} together, which "
                "needs one layout; leave it out"
            )
        if isinstance(layout, UpdateLayout):
            fitted[role] = fit_update_layout(layout, world_size, key)
        else:
            check_generation_layout(layout, world_size, key)
    return replace(checked, own_layouts=fitted)


def checked_layout(config: Config, verb: Verb, launch: LaunchEnvironment, *, is_here: bool) -> UpdateLayout:
    """Return the update layout of a job, which its model fits; without `is_here`, devices needn't be here."""
    is_trained = verb in TRAINED
    updating = generating = range(launch.world_size)
    if verb == "train":
        updating, generating = config.resources.ranks.split(launch.world_size)
    per_node = launch.local_world_size
    if updating != generating and launch.num_nodes > 1 and len(generating) % per_node:
        raise ValueError(
            f"resources.ranks.generation is {len(generating)}, but each of the job's {launch.num_nodes} nodes has "
            f"{per_node} ranks, which all train or all generate; set it to a multiple of {per_node}"
        )
    layout = fit_update_layout(config.resources.update, len(updating))
    check_generation_layout(config.resources.generation, len(generating))
    device = find_device(config.resources.device, launch.device_index) if is_here else None
    if (decoder := decoder_at_hand(config)) is not None:
        check_generation_cuts(decoder, config.resources.generation)
        if config.rollout.engine != "vllm":
            wants_graphs(
                config.rollout, decoder, config.resources.generation, None if device is None else device.torch_device
            )
        if is_trained:
            check_model_fits(config, decoder, layout)
    if config.debug.batch_invariant:
        check_batch_invariant(config, layout, find_device(config.resources.device, launch.device_index).kind)
    if config.rollout.engine == "vllm":
        check_vllm(config)
        check_vllm_on(config, generating, launch.world_size)
        if is_here and find_spec("vllm") is None:
            raise ValueError(
                f"rollout.engine is vllm, which isn't installed; {how_to_install('vllm')}, or set rollout.engine to "
                "native"
            )
    if is_here and is_trained:
        check_backends(config.log)
    return layout


def check_head_is_trained(checked: CheckedRun) -> None:
    """Refuse adapters for a model whose new head is trained too."""
    if checked.config.lora is not None:
        raise ValueError(
            "lora is set, but a reward model's head is trained too, which adapters would leave at 0; leave out lora"
        )
