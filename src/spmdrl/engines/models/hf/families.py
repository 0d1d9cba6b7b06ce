"""Model families: their particular config.json entries, and entries that our decoder doesn't compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.config_values import entries, flag, number, only, values, whole_number
from spmdrl.nouns.settings.model_sizes import LatentConfig, MoeConfig


@dataclass(frozen=True)
class Family:
    """Differences of one model_type from the others in config.json."""

    architecture: str
    """Class name in transformers."""
    has_qk_norm: bool = False
    """True if queries and keys are normalized per head."""
    allows_null_head_size: bool = False
    """True if a head_dim of null means that it isn't given, which other families refuse."""
    default_head_size: int | None = None
    """Head size without head_dim; None is hidden_size / num_attention_heads."""
    has_attention_bias: bool | None = None
    """True if attention projections have biases; None: as attention_bias is set."""
    default_attention_bias: bool = False
    """attention_bias if it isn't given."""
    default_theta: float = 10000.0
    """Base of the rotary frequencies without rope_theta."""
    default_tying: bool = False
    """True if the head is the embedding without tie_word_embeddings."""
    default_padding: int | None = None
    """Padding token without pad_token_id; transformers requires it inside the vocabulary."""
    has_own_kv_heads: bool = False
    """True for as many key as query heads without num_key_value_heads."""
    default_window: int | None = None
    """Tokens that attention sees back without sliding_window; None is all."""
    has_window_flag: bool = False
    """True if sliding_window only applies with use_sliding_window."""
    has_window_layers: bool = False
    """True if layer_types or max_window_layers select the layers with the window, rather than all."""
    has_mlp_bias: bool = False
    """True if mlp_bias may be true."""
    read_unrotated: Callable[[Mapping[str, Any]], tuple[int, ...]] = lambda raw: ()
    """Reads the layers that don't rotate queries and keys."""
    read_moe: Callable[[Mapping[str, Any]], MoeConfig | None] = lambda raw: None
    """Reads the sparse layers."""
    read_latent: Callable[[Mapping[str, Any]], LatentConfig | None] = lambda raw: None
    """Reads the latent attention."""
    write: Callable[[DecoderConfig], dict[str, Any]] = lambda config: {}
    """Returns the entries that only this family has."""


def _read_qwen3_moe(raw: Mapping[str, Any]) -> MoeConfig | None:
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
        num_experts=_num_experts(raw, "num_experts"),
        experts_per_token=whole_number(raw, "num_experts_per_tok"),
        intermediate_size=whole_number(raw, "moe_intermediate_size"),
        normalize=flag(raw, "norm_topk_prob", default=False),
        dense_layers=dense_layers,
    )


def _write_qwen3_moe(config: DecoderConfig) -> dict[str, Any]:
    assert config.moe is not None, "a qwen3_moe has sparse layers"
    return {
        "num_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.experts_per_token,
        "moe_intermediate_size": config.moe.intermediate_size,
        "norm_topk_prob": config.moe.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(config.moe.dense_layers),
    }


def _read_deepseek_moe(raw: Mapping[str, Any]) -> MoeConfig | None:
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
        num_experts=_num_experts(raw, "n_routed_experts"),
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


def _read_deepseek_latent(raw: Mapping[str, Any]) -> LatentConfig | None:
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


def _write_deepseek(config: DecoderConfig) -> dict[str, Any]:
    moe, latent = config.moe, config.latent
    assert moe is not None and latent is not None, "a deepseek_v3 has sparse layers and latent attention"
    return {
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.intermediate_size,
        "n_shared_experts": moe.num_shared_experts,
        "n_group": moe.num_groups,
        "topk_group": moe.groups_per_token,
        "norm_topk_prob": moe.normalize,
        "routed_scaling_factor": moe.weight_scale,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "first_k_dense_replace": len(moe.dense_layers),
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.key_value_rank,
        "qk_nope_head_dim": latent.plain_size,
        "qk_rope_head_dim": latent.rotary_size,
        "v_head_dim": latent.value_size,
        "rope_interleave": latent.rotates_neighbours,
        # Layers that predict further tokens aren't part of the decoder, nor written.
        "num_nextn_predict_layers": 0,
    }


def _read_unrotated(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Read SmolLM3's no_rope_layers, which has a 1 for each layer that does rotate."""
    num_layers = whole_number(raw, "num_hidden_layers")
    interval = whole_number(raw, "no_rope_layer_interval", 4)
    rotates = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if raw.get("no_rope_layers") is not None:
        rotates = values(raw, "no_rope_layers", int)
    if len(rotates) != num_layers or not set(rotates) <= {0, 1}:
        raise ValueError(f"no_rope_layers is {rotates}, but must hold 0 or 1 for each of the {num_layers} layers")
    return tuple(layer for layer in range(num_layers) if not rotates[layer])


def _write_smollm3(config: DecoderConfig) -> dict[str, Any]:
    rotates = [int(layer not in config.unrotated_layers) for layer in range(config.num_layers)]
    # Without an entry, transformers takes token 128004 for padding, which few vocabularies but SmolLM3's have.
    return {
        "mlp_bias": config.mlp_bias,
        "no_rope_layers": rotates,
        "use_sliding_window": False,
        "pad_token_id": None,
    }


def _write_mlp_bias(config: DecoderConfig) -> dict[str, Any]:
    return {"mlp_bias": config.mlp_bias}


def _num_experts(raw: Mapping[str, Any], key: str) -> int:
    """Return the number of experts under the family's key, or under transformers' common one; both must agree."""
    given = {name: raw[name] for name in (key, "num_local_experts") if raw.get(name) is not None}
    if len(set(map(str, given.values()))) > 1:
        raise ValueError(f"{key} {raw[key]!r} and num_local_experts {raw['num_local_experts']!r} differ; remove one")
    return whole_number(raw, next(iter(given), key))


FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        allows_null_head_size=True,
        has_own_kv_heads=True,
        has_mlp_bias=True,
        write=_write_mlp_bias,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        allows_null_head_size=True,
        has_attention_bias=False,
        default_window=4096,
        write=lambda config: {"sliding_window": None},
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        default_theta=2000000.0,
        default_tying=True,
        default_padding=128004,
        has_mlp_bias=True,
        read_unrotated=_read_unrotated,
        write=_write_smollm3,
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        default_head_size=128,
        default_attention_bias=True,
        default_padding=1,
        has_mlp_bias=True,
        write=lambda config: {**_write_mlp_bias(config), "attention_out_bias": False},
    ),
    "qwen2": Family("Qwen2ForCausalLM", has_attention_bias=True, has_window_flag=True, has_window_layers=True),
    "qwen3": Family(
        "Qwen3ForCausalLM", has_qk_norm=True, default_head_size=128, has_window_flag=True, has_window_layers=True
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        has_qk_norm=True,
        has_window_flag=True,
        read_moe=_read_qwen3_moe,
        write=_write_qwen3_moe,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        read_moe=_read_deepseek_moe,
        read_latent=_read_deepseek_latent,
        write=_write_deepseek,
    ),
}
# Other names of the same architecture; written folders have the name on the right, which transformers opens itself.
OTHER_NAMES = {"kimi_k2": "deepseek_v3"}


def family_name(model_type: object) -> str:
    """Return the family of a config.json's model_type; raises ValueError if none computes it."""
    name = OTHER_NAMES.get(model_type, model_type) if isinstance(model_type, str) else ""
    if name not in FAMILIES:
        others = ", ".join(f"{other} (as {family})" for other, family in OTHER_NAMES.items())
        raise ValueError(
            f"model_type {model_type!r} is not supported; supported are {', '.join(FAMILIES)} and {others}; a family "
            f"of the same layers is added as one entry in spmdrl/engines/models/hf/{Path(__file__).name}"
        )
    return name


def refuse_unsupported(raw: Mapping[str, Any], family: Family) -> None:
    """Raise ValueError, naming the first entry that the decoder would compute differently from transformers."""
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {raw['hidden_act']!r} is not supported; supported is 'silu'")
    if not family.has_mlp_bias:
        only(raw, "mlp_bias", False)
    if flag(raw, "attention_out_bias", default=False):
        raise ValueError("attention_out_bias true is not supported; supported is false")
    if raw.get("quantization_config") is not None:
        method = entries(raw, "quantization_config").get("quant_method")
        raise ValueError(f"quantization_config {method!r} is not supported; give the model's unquantized weights")
    if raw.get("transformers_weights") is not None:
        raise ValueError(
            f"transformers_weights names {raw['transformers_weights']!r} for the weights, which isn't read; give a "
            "folder with model.safetensors or its index"
        )
    _check_token_ids(raw, family)
    if raw.get("is_causal", True) is not True:
        raise ValueError(f"is_causal is {raw['is_causal']!r}, but supported is causal attention only")
    if raw.get("per_layer_config") is not None:
        raise ValueError("per_layer_config is given, but supported are layers of one shape only")
    _refuse_windows(raw, family)


def _refuse_windows(raw: Mapping[str, Any], family: Family) -> None:
    """Raise ValueError if attention doesn't see every earlier token of the longest row."""
    num_layers, max_positions = whole_number(raw, "num_hidden_layers"), whole_number(raw, "max_position_embeddings")
    kinds = values(raw, "layer_types", str)
    if raw.get("layer_types") is not None and len(kinds) != num_layers:
        raise ValueError(f"layer_types names {len(kinds)} layers, but num_hidden_layers is {num_layers}")
    window = raw.get("sliding_window", family.default_window)
    if window is not None and type(window) is not int:
        raise ValueError(f"sliding_window is {window!r}, but must be a whole number or null")
    is_asked_for = flag(raw, "use_sliding_window", default=False)
    if family.has_window_flag and not is_asked_for:
        window = None
    num_windows = num_layers
    if family.has_window_layers:
        first = whole_number(raw, "max_window_layers", 0, least=0)
        num_windows = kinds.count("sliding_attention") if kinds else max(0, num_layers - first)
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or (window is None and "sliding_attention" in kinds):
        raise ValueError(f"layer_types {kinds} is not supported; supported is 'full_attention' for each layer")
    if window is not None and num_windows and window < max_positions:
        raise ValueError(
            f"sliding_window hides tokens more than {window} back in {num_windows} of {num_layers} layers; "
            f"supported is full attention: where no row is longer than that, set max_position_embeddings to {window} "
            "in config.json"
        )


def _check_token_ids(raw: Mapping[str, Any], family: Family) -> None:
    """Check token ids: they go into checkpoints, and transformers opens none with ids of another type or outside."""
    for key in ("bos_token_id", "pad_token_id", "eos_token_id"):
        value = raw.get(key)
        ids = value if key == "eos_token_id" and isinstance(value, list) else [] if value is None else [value]
        if any(type(token_id) is not int for token_id in ids):
            raise ValueError(f"{key} is {value!r}, but must be a token id")
    padding, vocab_size = raw.get("pad_token_id", family.default_padding), whole_number(raw, "vocab_size")
    if padding is not None and not -vocab_size <= padding < vocab_size:
        raise ValueError(f"pad_token_id is {padding}, but vocab_size is {vocab_size}; correct one of them")
