"""Stored forms of the families whose files fuse weights, or hold more than the decoder."""

from __future__ import annotations

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.stored_forms import EXPERTS_ONE_BY_ONE, StoredForm, StoredForms

_TEXT_PREFIXES = {"model.language_model.model.": "model.", "model.language_model.": "model."}
_LLAVA_PREFIXES = {**_TEXT_PREFIXES, "language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
_QWEN_LEFT_OUT = ("model.visual.", "mtp.")
_TOWERS = ("vision_tower.", "multi_modal_projector.", "audio_tower.", "embed_vision.", "embed_audio.")
_GATE, _UP, _DOWN = (f"mlp.experts.{name}_proj" for name in ("gate", "up", "down"))
_GATE_UP = "mlp.experts.gate_up_proj"
_SHARED_EXPERT = tuple(
    StoredForm(f"mlp.shared_expert.{name}.weight", {f"mlp.shared_experts.{name}.weight": 1})
    for name in ("gate_proj", "up_proj", "down_proj")
)


def qwen3_5_forms(key_size: int, value_size: int, expert_width: int | None = None) -> StoredForms:
    """Return the forms of Qwen3.5: sizes of all key and all value heads of the delta net, and of one expert, if any."""
    experts = (
        ()
        if expert_width is None
        else (
            *EXPERTS_ONE_BY_ONE,
            StoredForm(_GATE_UP, {_GATE: expert_width, _UP: expert_width}, dim=1),
            *_SHARED_EXPERT,
        )
    )
    return StoredForms((*_delta_net(key_size, value_size), *experts), _TEXT_PREFIXES, _QWEN_LEFT_OUT)


def qwen3_next_forms(num_key_heads: int, key_head_size: int, num_value_heads: int, value_head_size: int) -> StoredForms:
    """Return the forms of Qwen3-Next: rows of the projections are interleaved by key heads of the delta net."""
    ratio, name = num_value_heads // num_key_heads, "linear_attn.in_proj"
    values = ratio * value_head_size
    sizes = {"q": key_head_size, "k": key_head_size, "v": values, "z": values}
    by_heads = (
        StoredForm(f"{name}_qkvz.weight", {f"{name}_{part}.weight": size for part, size in sizes.items()}),
        StoredForm(f"{name}_ba.weight", {f"{name}_b.weight": ratio, f"{name}_a.weight": ratio}),
    )
    _, conv = _delta_net(num_key_heads * key_head_size, num_value_heads * value_head_size)
    return StoredForms((*by_heads, conv, *EXPERTS_ONE_BY_ONE, *_SHARED_EXPERT), left_out=_QWEN_LEFT_OUT)


def stored_qwen3_5(config: DecoderConfig) -> StoredForms:
    """Return the forms of a Qwen3.5, dense or sparse."""
    delta, moe = config.delta, config.moe
    # Without delta nets nothing has their names.
    sizes = (1, 1)
    if delta is not None:
        sizes = (delta.num_key_heads * delta.key_size, delta.num_value_heads * delta.value_size)
    return qwen3_5_forms(*sizes, None if moe is None else moe.intermediate_size)


def stored_qwen3_next(config: DecoderConfig) -> StoredForms:
    """Return the forms of a Qwen3-Next."""
    delta = config.delta
    sizes = (1, 1, 1, 1)
    if delta is not None:
        sizes = (delta.num_key_heads, delta.key_size, delta.num_value_heads, delta.value_size)
    return qwen3_next_forms(*sizes)


GPT_OSS_FORMS = StoredForms(
    (
        StoredForm(_GATE_UP, {_GATE: 1, _UP: 1}, dim=1, transposed=True),
        StoredForm(f"{_GATE_UP}_bias", {f"{_GATE}_bias": 1, f"{_UP}_bias": 1}, dim=1),
        StoredForm(_DOWN, {_DOWN: 1}, transposed=True),
        StoredForm("mlp.router.weight", {"mlp.gate.weight": 1}),
        StoredForm("mlp.router.bias", {"mlp.gate.bias": 1}),
    )
)
GEMMA3_FORMS = StoredForms((), _LLAVA_PREFIXES, (*_TOWERS, *(f"model.{tower}" for tower in _TOWERS)))
GEMMA4_FORMS = StoredForms((), _TEXT_PREFIXES, tuple(f"model.{tower}" for tower in _TOWERS))


def _delta_net(key_size: int, value_size: int) -> tuple[StoredForm, StoredForm]:
    sizes = {"q": key_size, "k": key_size, "v": value_size}
    return (
        StoredForm(
            "linear_attn.in_proj_qkv.weight",
            {f"linear_attn.in_proj_{part}.weight": size for part, size in sizes.items()},
        ),
        StoredForm(
            "linear_attn.conv1d.weight", {f"linear_attn.conv_{part}.weight": size for part, size in sizes.items()}
        ),
    )
