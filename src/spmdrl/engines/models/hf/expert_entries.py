"""Readers and writers of config.json's entries for families of experts, latent attention and delta networks.

They raise ValueError for an entry that the decoder would compute differently from transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.config_rope import rope_entries
from spmdrl.engines.models.hf.config_values import flag, number, only, values, whole_number
from spmdrl.engines.models.hf.window_entries import (
    FULL,
    Fields,
    read_kinds,
    read_window,
    write_qwen_window,
    written_window,
)
from spmdrl.nouns.settings.model_sizes import ClampedGate, DeltaSizes, IndexerSizes, LatentConfig, MoeConfig

_LINEAR = "linear_attention"


def read_qwen3_moe(raw: Mapping[str, Any]) -> Fields:
    """Read the sparse layers, and a window of all layers."""
    size = raw.get("sliding_window", 4096) if flag(raw, "use_sliding_window", default=False) else None
    return {"moe": _qwen3_moe(raw), "window": read_window({**raw, "sliding_window": size}, default=None)}


def _qwen3_moe(raw: Mapping[str, Any]) -> MoeConfig:
    num_layers = whole_number(raw, "num_hidden_layers")
    step = whole_number(raw, "decoder_sparse_step", 1)
    dense = set(values(raw, "mlp_only_layers", int)) | {i for i in range(num_layers) if (i + 1) % step}
    dense_layers = tuple(i for i in range(num_layers) if i in dense)
    if len(dense_layers) == num_layers:
        raise ValueError(
            f"mlp_only_layers {raw.get('mlp_only_layers')} and decoder_sparse_step {step} leave none of the "
            f"{num_layers} layers sparse; such a model is a qwen3"
        )
    return MoeConfig(
        num_experts=count_of_experts(raw, "num_experts"),
        experts_per_token=whole_number(raw, "num_experts_per_tok"),
        intermediate_size=whole_number(raw, "moe_intermediate_size"),
        normalize=flag(raw, "norm_topk_prob", default=False),
        dense_layers=dense_layers,
    )


def write_qwen3_moe(config: DecoderConfig) -> Fields:
    assert config.moe is not None, "a qwen3_moe has sparse layers"
    return {
        **write_qwen_window(config),
        "num_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.experts_per_token,
        "moe_intermediate_size": config.moe.intermediate_size,
        "norm_topk_prob": config.moe.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(config.moe.dense_layers),
    }


def read_deepseek(raw: Mapping[str, Any]) -> Fields:
    """Read sparse layers and latent attention."""
    latent = _deepseek_latent(raw)
    return {"moe": _deepseek_moe(raw), "latent": latent, "head_size": latent.head_size}


def _deepseek_moe(raw: Mapping[str, Any]) -> MoeConfig:
    only(raw, "scoring_func", "sigmoid")
    only(raw, "topk_method", "noaux_tc")
    only(raw, "moe_layer_freq", 1)
    num_layers = whole_number(raw, "num_hidden_layers")
    num_dense = whole_number(raw, "first_k_dense_replace", least=0)
    if num_dense >= num_layers:
        raise ValueError(
            f"first_k_dense_replace {num_dense} leaves none of the {num_layers} layers sparse; it must be lower"
        )
    return MoeConfig(
        num_experts=count_of_experts(raw, "n_routed_experts"),
        experts_per_token=whole_number(raw, "num_experts_per_tok"),
        intermediate_size=whole_number(raw, "moe_intermediate_size"),
        scoring="sigmoid",
        normalize=flag(raw, "norm_topk_prob", default=True),
        weight_scale=number(raw, "routed_scaling_factor"),
        num_groups=whole_number(raw, "n_group"),
        groups_per_token=whole_number(raw, "topk_group"),
        num_shared_experts=whole_number(raw, "n_shared_experts"),
        dense_layers=tuple(range(num_dense)),
    )


def _deepseek_latent(raw: Mapping[str, Any]) -> LatentConfig:
    if "q_lora_rank" not in raw:
        raise ValueError("q_lora_rank is missing, but must be a whole number >= 1, or null for a plain q_proj")
    latent = LatentConfig(
        query_rank=None if raw["q_lora_rank"] is None else whole_number(raw, "q_lora_rank"),
        key_value_rank=whole_number(raw, "kv_lora_rank"),
        plain_size=whole_number(raw, "qk_nope_head_dim"),
        rotary_size=whole_number(raw, "qk_rope_head_dim"),
        value_size=whole_number(raw, "v_head_dim"),
        rotates_neighbours=flag(raw, "rope_interleave", default=True),
    )
    # transformers writes both, and would let them overrule the sizes that they follow from.
    only(raw, "head_dim", latent.rotary_size)
    only(raw, "qk_head_dim", latent.head_size)
    return latent


def write_deepseek(config: DecoderConfig) -> Fields:
    latent = config.latent
    assert latent is not None, "a deepseek_v3 has latent attention"
    return {
        **_written_deepseek_moe(config),
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.key_value_rank,
        "qk_nope_head_dim": latent.plain_size,
        "qk_rope_head_dim": latent.rotary_size,
        "v_head_dim": latent.value_size,
        "rope_interleave": latent.rotates_neighbours,
    }


def _written_deepseek_moe(config: DecoderConfig) -> Fields:
    moe = config.moe
    assert moe is not None, f"a {config.model_type} has sparse layers"
    return {
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.intermediate_size,
        "n_shared_experts": moe.num_shared_experts,
        "n_group": moe.num_groups,
        "topk_group": moe.groups_per_token,
        "norm_topk_prob": moe.normalize,
        "routed_scaling_factor": moe.weight_scale,
        "first_k_dense_replace": len(moe.dense_layers),
        # Layers that predict further tokens aren't part of the decoder, nor written.
        "num_nextn_predict_layers": 0,
    }


def read_glm4_moe(raw: Mapping[str, Any]) -> Fields:
    """Read DeepSeek's sparse layers beside plain attention, with head norms by a flag."""
    return {"moe": _deepseek_moe(raw), "qk_norm": flag(raw, "use_qk_norm", default=False)}


def write_glm4_moe(config: DecoderConfig) -> Fields:
    return {**_written_deepseek_moe(config), "use_qk_norm": config.qk_norm}


def read_glm_moe_dsa(raw: Mapping[str, Any]) -> Fields:
    """Read DeepSeek's layers, and an indexer, without which rows of at most index_topk tokens are the same."""
    only(raw, "rope_interleave", True)
    read_kinds(raw, ("indexed_attention",))
    whole_number(raw, "q_lora_rank")
    num_layers, max_positions = whole_number(raw, "num_hidden_layers"), whole_number(raw, "max_position_embeddings")
    kinds = values(raw, "mlp_layer_types", str)
    num_dense = kinds.count("dense") if kinds else whole_number(raw, "first_k_dense_replace", 3, least=0)
    if kinds and kinds != ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense):
        raise ValueError(f"mlp_layer_types is {kinds}, but supported are dense layers first, then sparse ones")
    indexer = IndexerSizes(
        num_heads=whole_number(raw, "index_n_heads", 32),
        head_size=whole_number(raw, "index_head_dim", 128),
        num_chosen=whole_number(raw, "index_topk", 2048),
        shared_layers=_layers_with_a_shared_choice(raw, num_layers),
        max_positions=max_positions,
    )
    fields = read_deepseek({**raw, "first_k_dense_replace": num_dense})
    return {
        **fields,
        "latent": replace(fields["latent"], indexer=indexer),
        "max_positions": min(max_positions, indexer.num_chosen),
        "rms_eps": number(raw, "rms_norm_eps", 1e-5),
    }


def _layers_with_a_shared_choice(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Read the layers that use the choice of the layer before."""
    kinds = raw.get("indexer_types") or raw.get("index_topk_pattern")
    if not kinds:
        frequency = whole_number(raw, "index_topk_freq", 1)
        first = whole_number(raw, "index_skip_topk_offset", 2, least=0) - 1
        kinds = ["shared" if max(layer - first, 0) % frequency else "full" for layer in range(num_layers)]
    if isinstance(kinds, str):
        kinds = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in kinds]
    kinds = values({"indexer_types": kinds}, "indexer_types", str)
    if len(kinds) != num_layers or kinds[0] != "full" or not {*kinds} <= {"full", "shared"}:
        raise ValueError(
            f"indexer_types is {kinds}, but must hold 'full' or 'shared' for each of the {num_layers} layers, and "
            "'full' for the first"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "shared")


def write_glm_moe_dsa(config: DecoderConfig) -> Fields:
    assert config.latent is not None and config.latent.indexer is not None, "a glm_moe_dsa has an indexer"
    indexer = config.latent.indexer
    return {
        **write_deepseek(config),
        "max_position_embeddings": indexer.max_positions,
        "index_n_heads": indexer.num_heads,
        "index_head_dim": indexer.head_size,
        "index_topk": indexer.num_chosen,
        # vLLM doesn't read indexer_types.
        "index_topk_pattern": "".join("FS"[i in indexer.shared_layers] for i in range(config.num_layers)),
    }


def read_gpt_oss(raw: Mapping[str, Any]) -> Fields:
    """Read windows in every other layer, sinks, and experts with biases and a clamped gate."""
    if not rope_entries(raw):
        raise ValueError("rope_parameters is missing, for which transformers takes gpt-oss-20b's yarn scaling; give it")
    return {
        "attention_sinks": True,
        "window": read_window(raw, default=128, is_windowed=lambda layer: layer % 2 == 0),
        "moe": MoeConfig(
            num_experts=count_of_experts(raw, "num_local_experts"),
            experts_per_token=whole_number(raw, "num_experts_per_tok", 4),
            intermediate_size=whole_number(raw, "intermediate_size"),
            # Its softmax over the chosen experts is their normalized share of one over all.
            normalize=True,
            bias=True,
            clamp=ClampedGate(number(raw, "swiglu_limit", 7.0), number(raw, "swiglu_alpha", 1.702)),
        ),
    }


def write_gpt_oss(config: DecoderConfig) -> Fields:
    moe = config.moe
    assert moe is not None and moe.clamp is not None, "a gpt_oss has sparse layers"
    return {
        **written_window(config),
        "intermediate_size": moe.intermediate_size,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "swiglu_limit": moe.clamp.limit,
        "swiglu_alpha": moe.clamp.alpha,
    }


def read_qwen3_5(raw: Mapping[str, Any]) -> Fields:
    """Read gated attention, norms that add one, and gated delta networks."""
    only(raw, "attn_output_gate", True)
    return {"attention_gate": True, "norm_offset": 1.0, "delta": _delta(raw)}


def read_qwen3_5_moe(raw: Mapping[str, Any]) -> Fields:
    """Read the same with a sparse feed-forward in each layer."""
    moe = MoeConfig(
        num_experts=count_of_experts(raw, "num_experts"),
        experts_per_token=whole_number(raw, "num_experts_per_tok"),
        intermediate_size=whole_number(raw, "moe_intermediate_size"),
        normalize=True,
        shared_size=whole_number(raw, "shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return {**read_qwen3_5(raw), "moe": moe, "intermediate_size": moe.intermediate_size}


def read_qwen3_next(raw: Mapping[str, Any]) -> Fields:
    """Read the same with Qwen3's choice of sparse layers."""
    shared_size = whole_number(raw, "shared_expert_intermediate_size")
    moe = replace(_qwen3_moe({"norm_topk_prob": True, **raw}), shared_size=shared_size, shared_gate=True)
    return {**read_qwen3_5(raw), "moe": moe}


def _delta(raw: Mapping[str, Any]) -> DeltaSizes | None:
    num_layers, interval = whole_number(raw, "num_hidden_layers"), whole_number(raw, "full_attention_interval", 4)
    kinds = read_kinds(raw, (FULL, _LINEAR))
    layers = [layer for layer in range(num_layers) if (kinds[layer] == _LINEAR if kinds else (layer + 1) % interval)]
    if not layers:
        return None
    return DeltaSizes(
        layers=tuple(layers),
        num_key_heads=whole_number(raw, "linear_num_key_heads", 16),
        num_value_heads=whole_number(raw, "linear_num_value_heads", 32),
        key_size=whole_number(raw, "linear_key_head_dim", 128),
        value_size=whole_number(raw, "linear_value_head_dim", 128),
        conv_width=whole_number(raw, "linear_conv_kernel_dim", 4, least=2),
    )


def write_qwen3_5(config: DecoderConfig) -> Fields:
    delta, kinds = config.delta, [FULL] * config.num_layers
    if delta is None:
        return {"layer_types": kinds}
    return {
        "layer_types": [_LINEAR if layer in delta.layers else FULL for layer in range(config.num_layers)],
        "linear_num_key_heads": delta.num_key_heads,
        "linear_num_value_heads": delta.num_value_heads,
        "linear_key_head_dim": delta.key_size,
        "linear_value_head_dim": delta.value_size,
        "linear_conv_kernel_dim": delta.conv_width,
    }


def write_qwen3_5_moe(config: DecoderConfig) -> Fields:
    assert config.moe is not None, f"a {config.model_type} has sparse layers"
    return {
        **write_qwen3_5(config),
        "num_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.experts_per_token,
        "moe_intermediate_size": config.moe.intermediate_size,
        "shared_expert_intermediate_size": config.moe.shared_width,
    }


def write_qwen3_next(config: DecoderConfig) -> Fields:
    return {**write_qwen3_moe(config), **write_qwen3_5_moe(config)}


def count_of_experts(raw: Mapping[str, Any], key: str) -> int:
    """Return the number of experts under the family's key, or under transformers' common one; both must agree."""
    given = {name: raw[name] for name in (key, "num_local_experts") if raw.get(name) is not None}
    if len(set(map(str, given.values()))) > 1:
        raise ValueError(f"{key} {raw[key]!r} and num_local_experts {raw['num_local_experts']!r} differ; remove one")
    return whole_number(raw, next(iter(given), key))
