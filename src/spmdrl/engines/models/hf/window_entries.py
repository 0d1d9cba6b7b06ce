"""Readers and writers of config.json's entries for families of dense layers that differ in windows and rotations.

They raise ValueError for an entry that the decoder would compute differently from transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.config_rope import plain_rope, read_window_theta, rope_entries, write_rope
from spmdrl.engines.models.hf.config_values import entries, flag, only, optional_number, values, whole_number
from spmdrl.nouns.settings.model_sizes import KeySizes, WindowConfig

Fields = dict[str, Any]
FULL, _WINDOWED = "full_attention", "sliding_attention"


def read_window(
    raw: Mapping[str, Any],
    *,
    default: int | None,
    is_windowed: Callable[[int], bool] | None = None,
    rope_theta: float | None = None,
) -> WindowConfig | None:
    """Read the layers that see the newest tokens only; None if a window is never shorter than a row.

    `is_windowed` says which layers they are if layer_types isn't given; without it they are all layers.
    """
    num_layers, size = whole_number(raw, "num_hidden_layers"), raw.get("sliding_window", default)
    kinds = [] if is_windowed is None else read_kinds(raw, (FULL, _WINDOWED))
    if size is None:
        if _WINDOWED in kinds:
            raise ValueError(f"layer_types has {_WINDOWED!r}, but sliding_window is null; set it to a number of tokens")
        return None
    size = whole_number({"sliding_window": size}, "sliding_window")
    layers = list(range(num_layers))
    if is_windowed is not None:
        layers = [layer for layer in layers if (kinds[layer] == _WINDOWED if kinds else is_windowed(layer))]
    hides = size < whole_number(raw, "max_position_embeddings") or rope_theta is not None
    return WindowConfig(size, tuple(layers), rope_theta) if layers and hides else None


def read_kinds(raw: Mapping[str, Any], supported: Sequence[str]) -> list[str]:
    """Read each layer's kind; empty if layer_types isn't given."""
    num_layers, kinds = whole_number(raw, "num_hidden_layers"), values(raw, "layer_types", str)
    if raw.get("layer_types") is not None and len(kinds) != num_layers:
        raise ValueError(f"layer_types names {len(kinds)} layers, but num_hidden_layers is {num_layers}")
    if unknown := sorted(set(kinds) - set(supported)):
        raise ValueError(f"layer_types has {unknown[0]!r}, but supported are {', '.join(map(repr, supported))}")
    return kinds


def read_qwen_window(raw: Mapping[str, Any]) -> WindowConfig | None:
    """Read the window of Qwen2 and Qwen3, of some layers or of those from max_window_layers on."""
    is_asked_for = flag(raw, "use_sliding_window", default=False)
    size, first = raw.get("sliding_window", 4096), whole_number(raw, "max_window_layers", 0, least=0)
    used = {**raw, "sliding_window": size if is_asked_for else None}
    return read_window(used, default=None, is_windowed=lambda layer: layer >= first)


def write_qwen_window(config: DecoderConfig) -> Fields:
    return {} if config.window is None else {"use_sliding_window": True, **written_window(config)}


def refuse_windows(raw: Mapping[str, Any]) -> None:
    """Raise ValueError if the entries of a family without windows have some."""
    if read_window(raw, default=None, is_windowed=lambda layer: True) is not None:
        raise ValueError(f"sliding_window {raw['sliding_window']!r} is not supported in this family; set it to null")


def written_window(config: DecoderConfig) -> Fields:
    """Return the entries of windows: without the types of layers some would be taken to have one."""
    layers = () if config.window is None else config.window.layers
    kinds = [_WINDOWED if layer in layers else FULL for layer in range(config.num_layers)]
    return {"layer_types": kinds, **({} if config.window is None else {"sliding_window": config.window.size})}


def read_gemma3(raw: Mapping[str, Any]) -> Fields:
    """Read four norms per layer, and windows with a rotation of their own."""
    only(raw, "attn_logit_softcapping", None)
    only(raw, "final_logit_softcapping", None)
    only(raw, "use_bidirectional_attention", False)
    interval = whole_number(raw, "sliding_window_pattern", 6)
    return {
        "norm_offset": 1.0,
        "output_norms": True,
        "scales_embedding": True,
        "gelu": True,
        "attention_scale": whole_number(raw, "query_pre_attn_scalar", 256) ** -0.5,
        "window": read_window(
            raw, default=4096, is_windowed=lambda layer: (layer + 1) % interval != 0, rope_theta=read_window_theta(raw)
        ),
    }


def write_gemma3(config: DecoderConfig) -> Fields:
    assert config.attention_scale is not None, "a gemma3_text has a scale of its own"
    ropes = _written_ropes(config)
    return {
        **written_window(config),
        # transformers takes whole numbers alone.
        "query_pre_attn_scalar": round(config.attention_scale**-2),
        "rope_local_base_freq": ropes[_WINDOWED]["rope_theta"],
        "rope_parameters": ropes,
    }


def _written_ropes(config: DecoderConfig) -> dict[str, dict[str, Any]]:
    theta = 10000.0 if config.window is None or config.window.rope_theta is None else config.window.rope_theta
    full = write_rope(config.rope_theta, config.rope_scaling)["rope_parameters"]
    return {FULL: full, _WINDOWED: plain_rope(theta)}


# Keys of its other forms, with transformers' value without the key and what they have there.
_OTHER_GEMMA4 = {
    "num_kv_shared_layers": (0, "layers that use the keys and values of earlier ones (E2B, E4B)"),
    "hidden_size_per_layer_input": (256, "embeddings of their own in each layer (E2B, E4B)"),
    "enable_moe_block": (False, "experts beside the feed-forward (26B-A4B)"),
}


def read_gemma4(raw: Mapping[str, Any]) -> Fields:
    """Read Gemma 3's norms and windows, layers without a window that have other keys, and a soft cap of the logits."""
    for key, (default, meaning) in _OTHER_GEMMA4.items():
        if value := raw.get(key, default):
            raise ValueError(f"{key} is {value!r}, but of Gemma 4 the dense form (31B) is supported, without {meaning}")
    only(raw, "use_bidirectional_attention", "vision")
    kind = rope_entries(raw).get("rope_type")
    if raw.get("rope_scaling") is not None or kind not in ("proportional", "default"):
        raise ValueError(
            f"rope_parameters.full_attention.rope_type is {kind!r} and rope_scaling {raw.get('rope_scaling')!r}, but "
            "in this family supported is 'proportional' or 'default', in rope_parameters"
        )
    last, theta = whole_number(raw, "num_hidden_layers") - 1, read_window_theta(raw)
    window = read_window(raw, default=512, is_windowed=lambda layer: (layer + 1) % 6 != 0, rope_theta=theta)
    # transformers lets the last layer see all tokens whatever its type.
    layers = () if window is None else tuple(layer for layer in window.layers if layer != last)
    return {
        "v_norm": True,
        "norm_offset": 0.0,
        "output_norms": True,
        "scales_layers": True,
        "scales_embedding": True,
        "gelu": True,
        "attention_scale": 1.0,
        "logit_softcap": optional_number(raw, "final_logit_softcapping"),
        "window": replace(window, layers=layers) if window is not None and layers else None,
        "full": _keys_without_window(raw, layers),
    }


def _keys_without_window(raw: Mapping[str, Any], windowed: Sequence[int]) -> KeySizes:
    """Read the sizes from the entries of published folders, or layer by layer as transformers writes them."""
    common = {"head_dim": whole_number(raw, "head_dim", 256), "num_key_value_heads": raw.get("num_key_value_heads")}
    are_values, by_layer = flag(raw, "attention_k_eq_v", default=False), raw.get("per_layer_config")
    if by_layer is None:
        full = {**common, "head_dim": whole_number(raw, "global_head_dim", 512)}
        if are_values and raw.get("num_global_key_value_heads") is not None:
            full["num_key_value_heads"] = raw["num_global_key_value_heads"]
    else:
        own = {int(layer): {**common, **entries(by_layer, layer)} for layer in entries(raw, "per_layer_config")}
        layers = [own.get(layer, common) for layer in range(whole_number(raw, "num_hidden_layers"))]
        full = layers[-1]
        alike = all(sizes == (common if layer in windowed else full) for layer, sizes in enumerate(layers))
        keeps_heads = are_values or full["num_key_value_heads"] == common["num_key_value_heads"]
        if not (alike and keeps_heads and full.keys() == common.keys()):
            raise ValueError(
                f"per_layer_config {by_layer!r} is not supported; supported is another head_dim in all layers that "
                "aren't sliding_attention, and another num_key_value_heads if attention_k_eq_v is true"
            )
    return KeySizes(whole_number(full, "head_dim"), whole_number(full, "num_key_value_heads"), are_values)


def write_gemma4(config: DecoderConfig) -> Fields:
    assert config.full is not None, "a gemma4_text has keys of its own in layers without a window"
    return {
        **written_window(config),
        "rope_parameters": _written_ropes(config),
        "global_head_dim": config.full.head_size,
        "num_global_key_value_heads": config.full.num_kv_heads,
        "attention_k_eq_v": config.full.are_values,
        "final_logit_softcapping": config.logit_softcap,
        "hidden_size_per_layer_input": 0,
    }


def read_smollm3(raw: Mapping[str, Any]) -> Fields:
    """Read no_rope_layers, which has a 1 for each layer that does rotate; the others may have a window."""
    unrotated, is_asked_for = _unrotated(raw), flag(raw, "use_sliding_window", default=False)
    used = {**raw, "sliding_window": raw.get("sliding_window") if is_asked_for else None}
    window = read_window(used, default=None, is_windowed=lambda layer: layer in unrotated)
    return {"unrotated_layers": unrotated, "window": window}


def _unrotated(raw: Mapping[str, Any]) -> tuple[int, ...]:
    num_layers = whole_number(raw, "num_hidden_layers")
    interval = whole_number(raw, "no_rope_layer_interval", 4)
    rotates = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if raw.get("no_rope_layers") is not None:
        rotates = values(raw, "no_rope_layers", int)
    if len(rotates) != num_layers or not set(rotates) <= {0, 1}:
        raise ValueError(f"no_rope_layers is {rotates}, but must hold 0 or 1 for each of the {num_layers} layers")
    return tuple(layer for layer in range(num_layers) if not rotates[layer])


def write_smollm3(config: DecoderConfig) -> Fields:
    rotates = [int(layer not in config.unrotated_layers) for layer in range(config.num_layers)]
    # Without an entry, transformers takes token 128004 for padding, which few vocabularies but SmolLM3's have.
    return {
        "mlp_bias": config.mlp_bias,
        "no_rope_layers": rotates,
        "use_sliding_window": False,
        **write_qwen_window(config),
        "pad_token_id": None,
    }


def write_mlp_bias(config: DecoderConfig) -> Fields:
    return {"mlp_bias": config.mlp_bias}
