"""Refuses by name what config.json may contain that the decoder doesn't compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spmdrl.engines.models.hf.config_values import entries, flag, only, values, whole_number
from spmdrl.engines.models.hf.families import Family


def refuse_unsupported(raw: Mapping[str, Any], family: Family) -> None:
    """Raise ValueError that names the first entry which the decoder would compute otherwise than transformers."""
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
    """Refuse attention that doesn't see every earlier token of the longest row."""
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
            f"sliding_window hides what is more than {window} tokens back in {num_windows} of {num_layers} layers; "
            f"supported is full attention: where no row is longer than that, set max_position_embeddings to {window} "
            "in config.json"
        )


def _check_token_ids(raw: Mapping[str, Any], family: Family) -> None:
    """These are written into checkpoints, and transformers opens none whose ids are of another type or outside."""
    for key in ("bos_token_id", "pad_token_id", "eos_token_id"):
        value = raw.get(key)
        ids = value if key == "eos_token_id" and isinstance(value, list) else [] if value is None else [value]
        if any(type(token_id) is not int for token_id in ids):
            raise ValueError(f"{key} is {value!r}, but must be a token id")
    padding, vocab_size = raw.get("pad_token_id", family.default_padding), whole_number(raw, "vocab_size")
    if padding is not None and not -vocab_size <= padding < vocab_size:
        raise ValueError(f"pad_token_id is {padding}, but vocab_size is {vocab_size}; correct one of them")
