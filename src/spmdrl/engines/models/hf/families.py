"""Model families: their particular config.json entries, and entries that our decoder doesn't compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf import expert_entries as experts
from spmdrl.engines.models.hf import window_entries as windows
from spmdrl.engines.models.hf.config_values import flag, only, whole_number
from spmdrl.engines.models.hf.family_forms import (
    GEMMA3_FORMS,
    GEMMA4_FORMS,
    GPT_OSS_FORMS,
    stored_qwen3_5,
    stored_qwen3_next,
)
from spmdrl.engines.models.hf.quantized import read_quantization
from spmdrl.engines.models.hf.stored_forms import USUAL_FORMS, StoredForms


@dataclass(frozen=True)
class Family:
    """Differences of one model_type from the others in config.json."""

    architecture: str
    """Class name in transformers."""
    has_qk_norm: bool = False
    """True if queries and keys are normalized per head."""
    allows_null_head_size: bool = False
    """True if a head_dim of null means that it isn't given, which other families refuse."""
    default_sizes: Mapping[str, int] = field(default_factory=dict)
    """Entries that config.json may leave out, with transformers' values."""
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
    has_mlp_bias: bool = False
    """True if mlp_bias may be true."""
    rotary_share: float | None = None
    """Rotated share of each head without partial_rotary_factor; None if heads are always rotated whole."""
    activation: tuple[str, str] = ("hidden_act", "silu")
    """Key and value of the feed-forward's activation."""
    has_windows: bool = False
    """True if `read` reads layer_types, and sliding windows if it has them."""
    has_sizes_by_layer: bool = False
    """True if `read` reads per_layer_config."""
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda raw: {}
    """Reads the entries that only some families have; returns fields of the decoder's config."""
    write: Callable[[DecoderConfig], dict[str, Any]] = lambda config: {}
    """Returns the entries that only this family has."""
    stored: Callable[[DecoderConfig], StoredForms] = lambda config: USUAL_FORMS
    """Returns the forms in which its folders store the weights."""


_with_delta_nets = partial(Family, has_qk_norm=True, default_head_size=256, rotary_share=0.25, has_windows=True)
FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        allows_null_head_size=True,
        has_own_kv_heads=True,
        has_mlp_bias=True,
        write=windows.write_mlp_bias,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        allows_null_head_size=True,
        has_attention_bias=False,
        has_windows=True,
        read=lambda raw: {"window": windows.read_window(raw, default=4096)},
        write=lambda config: {"sliding_window": config.window and config.window.size},
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        default_theta=2000000.0,
        default_tying=True,
        default_padding=128004,
        has_mlp_bias=True,
        has_windows=True,
        read=windows.read_smollm3,
        write=windows.write_smollm3,
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        default_head_size=128,
        default_attention_bias=True,
        default_padding=1,
        has_mlp_bias=True,
        write=lambda config: {**windows.write_mlp_bias(config), "attention_out_bias": False},
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        has_attention_bias=True,
        has_windows=True,
        read=lambda raw: {"window": windows.read_qwen_window(raw)},
        write=windows.write_qwen_window,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        has_qk_norm=True,
        default_head_size=128,
        has_windows=True,
        read=lambda raw: {"window": windows.read_qwen_window(raw)},
        write=windows.write_qwen_window,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        has_qk_norm=True,
        has_windows=True,
        read=experts.read_qwen3_moe,
        write=experts.write_qwen3_moe,
    ),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", read=experts.read_deepseek, write=experts.write_deepseek),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM", rotary_share=0.5, read=experts.read_glm4_moe, write=experts.write_glm4_moe
    ),
    "glm_moe_dsa": Family(
        "GlmMoeDsaForCausalLM", has_windows=True, read=experts.read_glm_moe_dsa, write=experts.write_glm_moe_dsa
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        default_head_size=64,
        default_attention_bias=True,
        default_theta=150000.0,
        has_windows=True,
        read=experts.read_gpt_oss,
        write=experts.write_gpt_oss,
        stored=lambda config: GPT_OSS_FORMS,
    ),
    "qwen3_5_text": _with_delta_nets(
        "Qwen3_5ForCausalLM", read=experts.read_qwen3_5, write=experts.write_qwen3_5, stored=stored_qwen3_5
    ),
    "qwen3_5_moe_text": _with_delta_nets(
        "Qwen3_5MoeForCausalLM", read=experts.read_qwen3_5_moe, write=experts.write_qwen3_5_moe, stored=stored_qwen3_5
    ),
    "qwen3_next": _with_delta_nets(
        "Qwen3NextForCausalLM", read=experts.read_qwen3_next, write=experts.write_qwen3_next, stored=stored_qwen3_next
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        has_qk_norm=True,
        # Those of the published 4B model, whose config.json leaves them out.
        default_sizes={
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
        },
        default_head_size=256,
        default_theta=1000000.0,
        default_tying=True,
        default_padding=0,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        has_windows=True,
        read=windows.read_gemma3,
        write=windows.write_gemma3,
        stored=lambda config: GEMMA3_FORMS,
    ),
    "gemma4_text": Family(
        "Gemma4ForCausalLM",
        has_qk_norm=True,
        default_head_size=256,
        default_theta=1000000.0,
        default_tying=True,
        default_padding=0,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        has_windows=True,
        has_sizes_by_layer=True,
        read=windows.read_gemma4,
        write=windows.write_gemma4,
        stored=lambda config: GEMMA4_FORMS,
    ),
}
TEXT_PARTS = {
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
}
"""Families of models that also read images, and the family of their language model, which alone is used and written."""
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
    key, activation = family.activation
    if raw.get(key, activation) is None:
        raise ValueError(f"{key} is null, but must be {activation!r}")
    only(raw, key, activation)
    if not family.has_windows:
        windows.refuse_windows(raw)
    if not family.has_mlp_bias:
        only(raw, "mlp_bias", False)
    if flag(raw, "attention_out_bias", default=False):
        raise ValueError("attention_out_bias true is not supported; supported is false")
    read_quantization(raw)
    if raw.get("transformers_weights") is not None:
        raise ValueError(
            f"transformers_weights names {raw['transformers_weights']!r} for the weights, which isn't read; give a "
            "folder with model.safetensors or its index"
        )
    _check_token_ids(raw, family)
    if raw.get("is_causal", True) is not True:
        raise ValueError(f"is_causal is {raw['is_causal']!r}, but supported is causal attention only")
    if raw.get("per_layer_config") is not None and not family.has_sizes_by_layer:
        raise ValueError("per_layer_config is given, but supported are layers of one shape only")


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
