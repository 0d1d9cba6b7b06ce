"""Rotary frequencies in config.json: the base, and all kinds of scaling, in transformers' old and new spelling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spmdrl.engines.models.hf.config_values import entries, flag, number, only, optional_number, whole_number
from spmdrl.engines.models.rope_scaling import (
    LinearScaling,
    Llama3Scaling,
    ProportionalScaling,
    RopeScaling,
    YarnScaling,
)

# The last two are shares of an image's axes (Qwen3.5), along all of which a text's positions are the same.
_COMMON_KEYS = {"type", "rope_type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
_OF_KINDS = {"full_attention", "sliding_attention"}
_KEYS_OF_KIND = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "truncate",
        "attention_factor",
        # Of another name in vLLM and llama.cpp; transformers ignores it, and so does the decoder.
        "attn_factor",
        "mscale",
        "mscale_all_dim",
    },
    "proportional": set(),
}


def rope_entries(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters; like transformers, the older key wins if both are given.

    If layers with a window have their own, these are the other layers'.
    """
    rope = entries(raw, _rope_key(raw))
    return entries(rope, "full_attention") if _OF_KINDS & set(rope) else rope


def read_window_theta(raw: Mapping[str, Any]) -> float:
    """Return the frequencies' base in Gemma's layers with a window, which have no scaling."""
    rope = entries(entries(raw, "rope_parameters"), "sliding_attention")
    only(rope, "rope_type", "default")
    return number(rope, "rope_theta", number(raw, "rope_local_base_freq", 10000.0))


def _rope_key(raw: Mapping[str, Any]) -> str:
    return "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"


def read_rotary_share(raw: Mapping[str, Any], default: float | None) -> float:
    """Return the rotated share of each head; without a default it must be 1."""
    rope = rope_entries(raw)
    if _kind_of(rope) == "proportional":
        if default is not None:
            raise ValueError("rope of kind 'proportional' is not supported beside a partial rotation of this family")
        # Its share is of the frequencies, and a kind of scaling.
        return 1.0
    given = {**raw, **rope}
    if default is None:
        only(given, "partial_rotary_factor", 1.0)
        return 1.0
    return _share(given, default)


def _share(given: Mapping[str, Any], default: float | None = None) -> float:
    share = number(given, "partial_rotary_factor", default)
    if share > 1:
        raise ValueError(f"partial_rotary_factor is {share}, but must be a share of at most 1")
    return share


def read_rope(raw: Mapping[str, Any], default_theta: float) -> tuple[float, RopeScaling | None]:
    """Return the frequencies' base and scaling; raises ValueError for any other kind of scaling."""
    key, rope = _rope_key(raw), rope_entries(raw)
    kind = _kind_of(rope)
    if not isinstance(kind, str) or kind not in _KEYS_OF_KIND:
        supported = ", ".join(map(repr, _KEYS_OF_KIND))
        raise ValueError(f"{key} of kind {kind!r} is not supported; supported are {supported}")
    for name in rope:
        if name not in _COMMON_KEYS | _KEYS_OF_KIND[kind]:
            names = ", ".join(sorted(_KEYS_OF_KIND[kind])) or "no more than rope_theta"
            raise ValueError(f"{key}.{name} {rope[name]!r} is not supported; supported with {kind!r}: {names}")
    # Null differs from missing: transformers computes with it.
    given = {"rope_theta": raw.get("rope_theta", default_theta), **rope}
    return number(given, "rope_theta"), _scaling(kind, rope, raw)


def _kind_of(rope: Mapping[str, Any]) -> object:
    return rope.get("rope_type", rope.get("type", "default"))


def write_rope(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Return the entries of config.json, for readers from before and after transformers 5."""
    if scaling is None:
        return {"rope_theta": theta, "rope_parameters": plain_rope(theta)}
    if isinstance(scaling, ProportionalScaling):
        kind = {"rope_type": "proportional", "partial_rotary_factor": scaling.share}
        # No reader from before has this kind.
        return {"rope_theta": theta, "rope_parameters": plain_rope(theta) | kind}
    rope: dict[str, Any]
    if isinstance(scaling, LinearScaling):
        rope = {"rope_type": "linear", "factor": scaling.factor}
    elif isinstance(scaling, Llama3Scaling):
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_positions,
        }
    else:
        optional = {name: getattr(scaling, name) for name in ("attention_factor", "mscale", "mscale_all_dim")}
        rope = {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_positions,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
            **{name: value for name, value in optional.items() if value is not None},
        }
    return {"rope_theta": theta, "rope_scaling": rope, "rope_parameters": {**rope, "rope_theta": theta}}


def plain_rope(theta: float) -> dict[str, Any]:
    """Return the entries of a rotation without scaling."""
    return {"rope_type": "default", "rope_theta": theta}


def _scaling(kind: str, rope: Mapping[str, Any], raw: Mapping[str, Any]) -> RopeScaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(number(rope, "factor"))
    if kind == "proportional":
        return ProportionalScaling(_share(rope))
    max_positions = whole_number(raw, "max_position_embeddings")
    # In transformers' order: beside the scaling, inside it, and else no row is longer than before.
    inside = whole_number(
        {"original_max_position_embeddings": max_positions, **rope}, "original_max_position_embeddings"
    )
    original = whole_number(raw, "original_max_position_embeddings", inside)
    if kind == "llama3":
        return Llama3Scaling(
            factor=number(rope, "factor"),
            low_freq_factor=number(rope, "low_freq_factor"),
            high_freq_factor=number(rope, "high_freq_factor"),
            original_positions=original,
        )
    if "factor" not in rope:
        raise ValueError("factor is missing in yarn rope scaling; give it, or null for the ratio of longest rows")
    return YarnScaling(
        factor=number(rope, "factor", max_positions / original),
        original_positions=original,
        beta_fast=number(rope, "beta_fast", 32.0),
        beta_slow=number(rope, "beta_slow", 1.0),
        truncate=flag(rope, "truncate", default=True),
        attention_factor=optional_number(rope, "attention_factor"),
        mscale=optional_number(rope, "mscale"),
        mscale_all_dim=optional_number(rope, "mscale_all_dim"),
    )
