"""The models of all benches, with random weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.model_folder import hf_config_dict, stored_forms
from spmdrl.engines.models.hf.model_weights import write_weights
from spmdrl.engines.models.make_model import RandomWeights
from spmdrl.engines.models.rope_scaling import Llama3Scaling, ProportionalScaling, YarnScaling
from spmdrl.nouns.settings.model_sizes import ClampedGate, DeltaSizes, KeySizes, LatentConfig, MoeConfig, WindowConfig


def qwen3(**fields: Any) -> DecoderConfig:
    """A Qwen3 with these sizes; fields that it has by default may be given too."""
    defaults = {
        "model_type": "qwen3",
        "rms_eps": 1e-6,
        "rope_theta": 10000.0,
        "qk_norm": True,
        "attention_bias": False,
        "tied_head": True,
        "max_positions": 4096,
    }
    return DecoderConfig(**(defaults | fields))


def qwen25(**fields: Any) -> DecoderConfig:
    """A Qwen2.5 with these sizes."""
    defaults = {
        "model_type": "qwen2",
        "rope_theta": 1e6,
        "qk_norm": False,
        "attention_bias": True,
        "max_positions": 32768,
    }
    return qwen3(**(defaults | fields))


QWEN_0_5B = qwen25(
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_size=64,
)
"""The shape of Qwen2.5-0.5B."""
QWEN_7B = qwen25(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_size=128,
    tied_head=False,
)
"""The shape of Qwen2.5-7B."""
TINY = qwen3(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=192,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
)
"""200 thousand parameters: what any device has done at once."""


# Sizes as their public config.json files have them.
QWEN25_32B = qwen25(
    vocab_size=152064,
    hidden_size=5120,
    intermediate_size=27648,
    num_layers=64,
    num_heads=40,
    num_kv_heads=8,
    head_size=128,
    tied_head=False,
)
QWEN3_30B_A3B = qwen3(
    model_type="qwen3_moe",
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_size=128,
    rope_theta=1e6,
    tied_head=False,
    max_positions=40960,
    moe=MoeConfig(num_experts=128, experts_per_token=8, intermediate_size=768, normalize=True),
)
QWEN3_30M = qwen3(
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=1536,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    head_size=64,
    max_positions=32768,
)


def _small_qwen3(*, hidden_size: int, intermediate_size: int, num_layers: int) -> DecoderConfig:
    return qwen3(
        vocab_size=512,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=8,
        num_kv_heads=4,
        head_size=hidden_size // 8,
    )


def _small_qwen3_moe(*, hidden_size: int, num_layers: int, num_experts: int, expert_size: int) -> DecoderConfig:
    dense = _small_qwen3(hidden_size=hidden_size, intermediate_size=3 * hidden_size, num_layers=num_layers)
    moe = MoeConfig(num_experts, experts_per_token=2, intermediate_size=expert_size, normalize=True)
    return replace(dense, model_type="qwen3_moe", moe=moe)


def _with_sinks(sparse: DecoderConfig) -> DecoderConfig:
    """A gpt-oss of a Qwen3-MoE's sizes."""
    assert sparse.moe is not None, "all layers of gpt-oss are sparse"
    return replace(
        sparse,
        model_type="gpt_oss",
        qk_norm=False,
        attention_bias=True,
        tied_head=False,
        attention_sinks=True,
        window=WindowConfig(128, layers=(0, 2, 4)),
        moe=replace(sparse.moe, bias=True, clamp=ClampedGate(7.0, 1.702)),
    )


ROLLOUT_MODELS = {
    "1M": _small_qwen3(hidden_size=128, intermediate_size=384, num_layers=4),
    "5M": _small_qwen3(hidden_size=256, intermediate_size=768, num_layers=6),
    "30M": _small_qwen3(hidden_size=512, intermediate_size=1920, num_layers=8),
    "3M-A1M": _small_qwen3_moe(hidden_size=128, num_layers=4, num_experts=8, expert_size=192),
    "20M-A4M": _small_qwen3_moe(hidden_size=256, num_layers=6, num_experts=16, expert_size=256),
    # Qwen3.5 0.8B's layers at half their width, with as many weights as 30M by their feed-forward.
    "30M-hybrid": replace(
        _small_qwen3(hidden_size=512, intermediate_size=848, num_layers=8),
        model_type="qwen3_5_text",
        num_heads=4,
        num_kv_heads=1,
        head_size=256,
        rotary_size=64,
        attention_gate=True,
        norm_offset=1.0,
        delta=DeltaSizes(
            (0, 1, 2, 4, 5, 6), num_key_heads=8, num_value_heads=8, key_size=128, value_size=128, conv_width=4
        ),
    ),
    # gpt-oss's layers in the sizes of 20M-A4M.
    "20M-A4M-sinks": _with_sinks(_small_qwen3_moe(hidden_size=256, num_layers=6, num_experts=16, expert_size=256)),
}
"""By parameters, in float32; of a sparse model, also those that a token meets."""

# Eight heads, experts and columns of each kind go into eight ranks; a vocabulary of 53 tokens divides by nothing, and
# four key heads are fewer than eight tensor ranks.
_DENSE = qwen3(
    vocab_size=53,
    hidden_size=24,
    intermediate_size=40,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    head_size=8,
    attention_bias=True,
    max_positions=256,
    rope_scaling=Llama3Scaling(4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=64),
)
_EXPERTS = MoeConfig(num_experts=8, experts_per_token=3, intermediate_size=16, normalize=True, dense_layers=(0,))
_LATENT = LatentConfig(query_rank=12, key_value_rank=10, plain_size=6, rotary_size=4, value_size=6)

LAYOUT_MODELS: dict[str, DecoderConfig] = {
    "dense": _DENSE,
    "moe": replace(
        _DENSE, model_type="qwen3_moe", attention_bias=False, tied_head=False, rope_scaling=None, moe=_EXPERTS
    ),
    "mla": replace(
        _DENSE,
        model_type="deepseek_v3",
        num_kv_heads=8,
        head_size=_LATENT.head_size,
        qk_norm=False,
        attention_bias=False,
        tied_head=False,
        rope_scaling=YarnScaling(4.0, original_positions=64, mscale=1.0, mscale_all_dim=1.0),
        moe=replace(
            _EXPERTS, scoring="sigmoid", weight_scale=1.5, num_groups=4, groups_per_token=2, num_shared_experts=1
        ),
        latent=_LATENT,
    ),
    "hybrid": replace(
        _DENSE,
        model_type="qwen3_5_text",
        attention_bias=False,
        tied_head=False,
        rope_scaling=None,
        rotary_size=4,
        # A row's first outputs of a delta net are tiny where query and key are nearly orthogonal, and the norm behind
        # it divides by them: with an eps of 1e-6, rounding of weights moves the next gradients by 1.5e-4.
        rms_eps=1e-2,
        attention_gate=True,
        norm_offset=1.0,
        delta=DeltaSizes((0, 1), num_key_heads=4, num_value_heads=8, key_size=16, value_size=6, conv_width=4),
    ),
    "sinks": replace(
        _DENSE,
        model_type="gpt_oss",
        qk_norm=False,
        tied_head=False,
        rope_scaling=None,
        attention_sinks=True,
        window=WindowConfig(7, layers=(0, 2)),
        moe=replace(_EXPERTS, dense_layers=(), bias=True, clamp=ClampedGate(7.0, 1.702)),
    ),
    "gemma": replace(
        _DENSE,
        model_type="gemma3_text",
        attention_bias=False,
        attention_scale=0.25,
        norm_offset=1.0,
        output_norms=True,
        # Norms give every block's output a size of about 1; a larger embedding keeps rounding from growing by layers.
        scales_embedding=True,
        gelu=True,
        window=WindowConfig(9, layers=(0, 2), rope_theta=100.0),
    ),
    "gemma4": replace(
        _DENSE,
        model_type="gemma4_text",
        attention_scale=1.0,
        v_norm=True,
        norm_offset=0.0,
        output_norms=True,
        scales_layers=True,
        gelu=True,
        logit_softcap=5.0,
        window=WindowConfig(9, layers=(0, 2), rope_theta=100.0),
        full=KeySizes(12, num_kv_heads=2, are_values=True),
        rope_scaling=ProportionalScaling(0.5),
    ),
}
"""Tiny ones with every part that a layout cuts; a case changes the number of layers."""


def write_model(folder: Path, config: DecoderConfig, **hf_fields: Any) -> None:
    """Make a Hugging Face folder with random float32 weights; `hf_fields` are added to its config.json."""
    write_config(folder, config, **hf_fields)
    weights = RandomWeights(config, seed=0)
    write_weights(folder, ((name, weights(name)) for name in weights.names), forms=stored_forms(config))


def write_config(folder: Path, config: DecoderConfig, **hf_fields: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config_dict(config, torch.float32) | hf_fields))
