from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from spmdrl.config.config import load_config
from spmdrl.config.reader import ConfigError
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.model_folder import (
    compute_dtype,
    hf_config_dict,
    parameter_shapes,
    read_config,
    resolve_model_folder,
)
from spmdrl.engines.models.rope_scaling import YarnScaling
from spmdrl.nouns.settings.model_config import MakeConfig, ModelConfig
from spmdrl.nouns.settings.model_sizes import KeySizes, MoeConfig, WindowConfig

QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}


def config_of(folder: Path, raw: dict[str, Any]) -> DecoderConfig:
    (folder / "config.json").write_text(json.dumps(raw))
    return read_config(folder)


def test_a_qwen2_config_is_read_with_its_biases_and_tied_head(tmp_path: Path) -> None:
    config = config_of(tmp_path, QWEN2)
    assert (config.head_size, config.num_layers, config.rope_theta) == (64, 24, 1e6)
    assert config.attention_bias and not config.output_bias and not config.qk_norm and config.tied_head


def test_both_spellings_of_the_rotary_base_are_read_alike(tmp_path: Path) -> None:
    newer = {key: value for key, value in QWEN2.items() if key != "rope_theta"}
    newer["rope_parameters"] = {"rope_type": "default", "rope_theta": 1000000.0}
    assert config_of(tmp_path, newer) == config_of(tmp_path, QWEN2 | {"rope_scaling": None})


@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama"])
def test_a_written_config_reads_back_as_itself(model_type: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, QWEN2 | {"model_type": model_type, "head_dim": 32, "attention_bias": True})
    assert config_of(tmp_path, hf_config_dict(config, torch.bfloat16)) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported; .* are llama, mistral, .* kimi_k2 .as deepseek_v3.;"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported is 'silu'"),
        ({"mlp_bias": True}, "mlp_bias True is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling of kind 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_parameters of kind 'longrope'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "factor is None, but must be a number"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "low_freq_factor": 1.0}}, "rope_scaling.low_freq_factor 1.0"),
        ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, "factor 0.5 and original_max_position_embeddings 32768"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0, but must be a whole number >= 1"),
        ({"layer_types": ["linear_attention"] * 24}, "layer_types has 'linear_attention', but supported are 'full_at"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config 'awq'"),
        ({"vocab_size": None}, "vocab_size is None, but must be a whole number >= 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, but models with more than 2048 aren't built"),
        ({"hidden_size": 10**9}, "hidden_size is 1000000000, but models with more than 1048576 "),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000, but models with more than"),
        ({"head_dim": 2**40}, "head_dim is 1099511627776, but models with more than"),
        ({"hidden_size": "896"}, "hidden_size is '896'"),
        ({"num_key_value_heads": None}, "num_key_value_heads is None"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types names 2 layers, but num_hidden_layers is 24"),
        (
            {"layer_types": ["sliding_attention"] * 24},
            "'sliding_attention', but sliding_window is null",
        ),
        ({"is_causal": False}, "is_causal is False"),
        ({"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config is given"),
        ({"transformers_weights": "other.safetensors"}, "transformers_weights names 'other.safetensors'"),
        ({"pad_token_id": 151936}, "pad_token_id is 151936, but vocab_size is 151936"),
        ({"eos_token_id": ["2"]}, "eos_token_id is .'2'., but must be a token id"),
        ({"rms_norm_eps": 1}, "rms_norm_eps is 1, but must be a number above 0"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings is None, but must be true or false"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', but must be a JSON object"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_parameters of kind .'yarn'."),
        ({"architectures": [0]}, "architectures is .0., but must be a list of str values"),
        ({"model_type": ["llama"]}, "model_type .'llama'. is not supported"),
        ({"num_key_value_heads": 3}, "num_attention_heads 14 is not a multiple of num_key_value_heads 3"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        config_of(tmp_path, QWEN2 | change)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"attention_dropout": 0.1},
        {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["full_attention"] * 24},
        {"use_sliding_window": True, "sliding_window": 32768},
        {"use_sliding_window": True, "sliding_window": None},
    ],
)
def test_settings_without_effect_here_are_accepted(change: dict[str, Any], tmp_path: Path) -> None:
    assert config_of(tmp_path, QWEN2 | change) == config_of(tmp_path, QWEN2)


# As published, without entries that have no effect on the decoder.
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def test_the_published_deepseek_v3_config_is_read_without_the_layers_for_further_tokens(tmp_path: Path) -> None:
    config = config_of(tmp_path, DEEPSEEK)
    assert config.moe == MoeConfig(
        num_experts=256,
        experts_per_token=8,
        intermediate_size=2048,
        scoring="sigmoid",
        normalize=True,
        weight_scale=2.5,
        num_groups=8,
        groups_per_token=4,
        num_shared_experts=1,
        dense_layers=(0, 1, 2),
    )
    state, rope = config.mixers[0].state(1), config.mixers[0].rope
    assert rope is not None
    assert config.rope_scaling == YarnScaling(factor=40.0, original_positions=4096, mscale=1.0, mscale_all_dim=1.0)
    assert [state.head_size, state.value_head_size, rope.size] == [192, 128, 64]
    shapes = parameter_shapes(config)
    assert 670e9 < sum(math.prod(shape) for shape in shapes.values()) < 672e9
    assert not any(name.startswith("model.layers.61.") for name in shapes)
    assert config_of(tmp_path, hf_config_dict(config, torch.bfloat16)) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; supported is 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported; supported is 'noaux_tc'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported; supported is 1"),
        ({"kv_lora_rank": None}, "kv_lora_rank is None, but must be a whole number >= 1"),
        ({"n_shared_experts": 0}, "n_shared_experts is 0, but must be a whole number >= 1"),
        ({"first_k_dense_replace": 61}, "first_k_dense_replace 61 leaves none of the 61 layers sparse"),
        ({"num_key_value_heads": 64}, "each of the 128 heads, of size 192, but num_key_value_heads is 64"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim 63 is odd"),
        ({"v_head_dim": 193}, "v_head_dim 193 is above qk_nope_head_dim 128 . qk_rope_head_dim 64 = 192"),
        ({"head_dim": 192}, "head_dim 192 is not supported; supported is 64"),
        ({"qk_head_dim": 64}, "qk_head_dim 64 is not supported; supported is 192"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes', but must be true or false"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor is 0, but must be a number above 0"),
    ],
)
def test_what_a_deepseek_cannot_do_is_refused_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path, DEEPSEEK | change)


@pytest.mark.parametrize("key", ["n_group", "topk_group", "num_key_value_heads"])
def test_sizes_that_transformers_has_defaults_of_its_own_for_are_required(key: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{key} is None, but must be a whole number"):
        config_of(tmp_path, {name: value for name, value in DEEPSEEK.items() if name != key})


def test_a_kimi_k2_is_a_deepseek_v3_by_another_name(tmp_path: Path) -> None:
    # Its own values where they differ from DeepSeek-V3's in more than size.
    kimi = DEEPSEEK | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
    config = config_of(tmp_path, kimi | {"model_type": "kimi_k2"})
    assert config == config_of(tmp_path, kimi)
    assert hf_config_dict(config, torch.bfloat16)["model_type"] == "deepseek_v3"


# The differences of GLM-5.
GLM_5 = {key: value for key, value in DEEPSEEK.items() if not key.startswith("rope")} | {
    "model_type": "glm_moe_dsa",
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "intermediate_size": 12288,
    "max_position_embeddings": 202752,
    "n_group": 1,
    "num_attention_heads": 64,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "topk_group": 1,
    "v_head_dim": 256,
    "vocab_size": 154880,
}


def test_a_glm_5_is_read_for_the_rows_in_which_its_indexer_chooses_all_tokens(tmp_path: Path) -> None:
    config = config_of(tmp_path, GLM_5)
    assert (config.max_positions, config.rope_theta, config.head_size) == (2048, 1e6, 256)
    assert "index_topk" in config.position_rule
    shapes = parameter_shapes(config)
    assert 743e9 < sum(math.prod(shape) for shape in shapes.values()) < 745e9
    of_indexers = [math.prod(shape) for name, shape in shapes.items() if ".indexer." in name]
    assert sum(of_indexers) == 78 * (2048 * 32 * 128 + 6144 * 128 + 2 * 128 + 6144 * 32)
    shared = config_of(tmp_path, GLM_5 | {"index_topk_freq": 4, "index_skip_topk_offset": 3})
    pattern = ("FFF" + "SSSF" * 19)[:78]
    assert shared == config_of(tmp_path, GLM_5 | {"index_topk_pattern": pattern})
    assert hf_config_dict(shared, torch.bfloat16)["index_topk_pattern"] == pattern
    for one in (config, shared):
        written = hf_config_dict(one, torch.bfloat16)
        assert (written["max_position_embeddings"], written["index_topk"]) == (202752, 2048)
        assert config_of(tmp_path, written) == one


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_interleave": False}, "rope_interleave False is not supported"),
        ({"q_lora_rank": None}, "q_lora_rank is None, but must be a whole number"),
        ({"layer_types": ["full_attention"] * 78}, "layer_types has 'full_attention', but supported are 'indexed_att"),
        ({"mlp_layer_types": ["sparse"] * 77 + ["dense"]}, "supported are dense layers first, then sparse ones"),
        ({"indexer_types": ["full"] * 77}, "must hold 'full' or 'shared' for each of the 78 layers"),
        ({"index_topk_pattern": "SF" * 39}, "'full' for the first"),
        ({"index_topk": 0}, "index_topk is 0, but must be a whole number >= 1"),
    ],
)
def test_what_a_glm_5_cannot_do_is_refused_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path, GLM_5 | change)


MISTRAL = {key: value for key, value in QWEN2.items() if not key.endswith(("window", "layers"))} | {
    "model_type": "mistral",
    "num_hidden_layers": 2,
}


def test_a_mistral_has_a_window_unless_it_holds_the_longest_row(tmp_path: Path) -> None:
    full = config_of(tmp_path, MISTRAL | {"sliding_window": None})
    assert full.model_type == "mistral" and not full.attention_bias and full.window is None
    assert config_of(tmp_path, MISTRAL | {"sliding_window": 32768}) == full
    windowed = config_of(tmp_path, MISTRAL | {"sliding_window": 4096})
    assert windowed.window == WindowConfig(4096, (0, 1)) == config_of(tmp_path, MISTRAL).window
    for config in (full, windowed):
        assert config_of(tmp_path, hf_config_dict(config, torch.bfloat16)) == config


@pytest.mark.parametrize(
    ("change", "layers"),
    [
        ({"max_window_layers": 21}, (21, 22, 23)),
        ({"layer_types": ["full_attention"] * 23 + ["sliding_attention"]}, (23,)),
        ({"layer_types": ["full_attention"] * 24}, ()),
    ],
)
def test_a_qwen_has_windows_from_a_layer_on_or_in_those_listed(
    change: dict[str, Any], layers: tuple[int, ...], tmp_path: Path
) -> None:
    config = config_of(tmp_path, QWEN2 | {"use_sliding_window": True, "sliding_window": 9} | change)
    assert config.window == (WindowConfig(9, layers) if layers else None)
    assert config_of(tmp_path, hf_config_dict(config, torch.bfloat16)) == config


# As published, but for entries of other parts: gemma-3-4b-it, which leaves the rest to transformers, and Qwen3.5-4B.
PUBLISHED = {
    "gemma3": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "qwen3_5": {
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "linear_num_value_heads": 32,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 16,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        "vocab_size": 248320,
    },
}


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_published_models_that_also_read_images_are_read_as_transformers_reads_them(model_type, tmp_path):
    from transformers import AutoConfig

    config = config_of(tmp_path, {"model_type": model_type, "text_config": PUBLISHED[model_type]})
    whole = AutoConfig.from_pretrained(tmp_path).get_text_config().to_dict()
    assert config_of(tmp_path, whole) == config
    assert config_of(tmp_path, hf_config_dict(config, torch.float32)) == config


def test_a_gpt_oss_without_rope_parameters_is_refused(tmp_path: Path) -> None:
    gpt_oss = QWEN2 | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 64}
    with pytest.raises(ValueError, match="rope_parameters is missing, for which transformers takes .* yarn scaling"):
        config_of(tmp_path, gpt_oss)
    full = config_of(tmp_path, gpt_oss | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
    assert full.attention_sinks and full.rope_scaling is None


GEMMA4_ROPES = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
# Gemma 4 31B's entries that matter here.
GEMMA4 = {
    "model_type": "gemma4_text",
    "vocab_size": 262144,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-06,
    "sliding_window": 1024,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
    "use_bidirectional_attention": "vision",
    "rope_parameters": GEMMA4_ROPES,
}


def test_a_gemma4_has_other_keys_in_layers_without_a_window(tmp_path: Path) -> None:
    config = config_of(tmp_path, GEMMA4)
    assert config.full == KeySizes(512, 4, are_values=True) and config.tied_head and config.logit_softcap == 30.0
    assert [mixer.head_size for mixer in config.mixers[:6]] == [256] * 5 + [512]
    assert [mixer.num_kv_heads for mixer in config.mixers[:6]] == [16] * 5 + [4]
    assert config_of(tmp_path, hf_config_dict(config, torch.bfloat16)) == config
    assert config_of(tmp_path, {"model_type": "gemma4", "text_config": GEMMA4}) == config
    by_layer = {str(layer): {"head_dim": 512, "num_key_value_heads": 4} for layer in range(5, 60, 6)}
    assert config_of(tmp_path, GEMMA4 | {"global_head_dim": None, "per_layer_config": by_layer}) == config
    plain = config_of(tmp_path, GEMMA4 | {"attention_k_eq_v": False})
    assert plain.full == KeySizes(512, 16), "num_global_key_value_heads counts with attention_k_eq_v alone"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_shared_layers": 20}, "num_kv_shared_layers is 20, but .* keys and values of earlier ones .E2B, E4B."),
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input is 256, but .* each layer .E2B, E4B."),
        ({"enable_moe_block": True}, "enable_moe_block is True, but .* experts beside the feed-forward .26B-A4B."),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported"),
        ({"rope_parameters": None}, "rope_parameters.full_attention.rope_type is None .* supported is 'proportional'"),
        ({"rope_scaling": GEMMA4_ROPES}, "and rope_scaling .'full_attention': .* in rope_parameters"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping is 0, but must be a number above 0"),
        ({"num_global_key_value_heads": 3}, "num_attention_heads 32 is not a multiple of num_key_value_heads 3"),
        (
            {"per_layer_config": {"5": {"head_dim": 512}}},
            "per_layer_config .* that aren't sliding_attention",
        ),
        (
            {"per_layer_config": {"0": {"head_dim": 512}}},
            "per_layer_config .* that aren't sliding_attention",
        ),
        (
            {"per_layer_config": {str(layer): {"intermediate_size": 9} for layer in range(5, 60, 6)}},
            "per_layer_config .* is not supported",
        ),
    ],
)
def test_what_a_gemma4_cannot_do_is_refused_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path, GEMMA4 | change)


def test_a_model_whose_window_holds_the_longest_row_is_written_without_one(tmp_path: Path) -> None:
    gpt_oss = QWEN2 | {"model_type": "gpt_oss", "num_local_experts": 4, "rope_parameters": {"rope_theta": 1e4}}
    config = config_of(tmp_path, gpt_oss | {"sliding_window": 32768})
    assert config.window is None and config_of(tmp_path, hf_config_dict(config, torch.bfloat16)) == config


def test_a_llama_with_a_window_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sliding_window 9 is not supported in this family"):
        config_of(tmp_path, QWEN2 | {"model_type": "llama", "sliding_window": 9})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"no_rope_layers": [1, 0]}, "no_rope_layers is .1, 0., but must hold 0 or 1 for each of the 24 layers"),
        ({"no_rope_layers": [2] * 24}, "must hold 0 or 1"),
        ({"no_rope_layers": "none"}, "no_rope_layers is 'none', but must be a list of int values"),
        ({"pad_token_id": 200000}, "pad_token_id is 200000"),
    ],
)
def test_what_a_smollm3_cannot_do_is_refused_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path, QWEN2 | {"model_type": "smollm3", "use_sliding_window": False} | change)


def test_layers_without_rotation_are_every_fourth_of_a_smollm3_unless_listed(tmp_path: Path) -> None:
    smollm3 = QWEN2 | {"model_type": "smollm3", "num_hidden_layers": 9}
    del smollm3["tie_word_embeddings"], smollm3["rope_theta"]
    config = config_of(tmp_path, smollm3)
    assert (config.unrotated_layers, config.tied_head, config.rope_theta) == ((3, 7), True, 2e6)
    listed = config_of(tmp_path, smollm3 | {"no_rope_layers": [1, 0, 1, 1, 1, 1, 1, 1, 0]})
    assert listed.unrotated_layers == (1, 8)
    assert config_of(tmp_path, hf_config_dict(listed, torch.bfloat16)) == listed


def test_a_missing_query_rank_is_not_taken_for_a_plain_projection(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="q_lora_rank is missing"):
        config_of(tmp_path, {key: value for key, value in DEEPSEEK.items() if key != "q_lora_rank"})


SPARSE = QWEN2 | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [1, 5, 6],
}


def test_a_qwen3_moe_is_sparse_where_step_and_list_leave_it(tmp_path: Path) -> None:
    config = config_of(tmp_path, SPARSE)
    assert config.moe is not None
    assert [i for i in range(24) if i not in config.moe.dense_layers] == [3, *range(7, 24, 2)]
    with pytest.raises(ValueError, match="decoder_sparse_step 25 leave none of the 24 layers sparse"):
        config_of(tmp_path, SPARSE | {"decoder_sparse_step": 25})
    with pytest.raises(ValueError, match="num_experts 8 and num_local_experts 4 differ"):
        config_of(tmp_path, SPARSE | {"num_local_experts": 4})
    windowed = config_of(tmp_path, SPARSE | {"use_sliding_window": True, "sliding_window": 4096})
    assert windowed.window == WindowConfig(4096, tuple(range(24)))
    assert config_of(tmp_path, hf_config_dict(windowed, torch.bfloat16)) == windowed


def test_a_folder_without_a_readable_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no config.json"):
        read_config(tmp_path)
    for content, message in (("{", "is not JSON"), ("[]", "must hold one JSON object")):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            read_config(tmp_path)


def test_exactly_one_of_path_and_make_is_required() -> None:
    with pytest.raises(ValueError, match="neither model.path nor model.make"):
        ModelConfig()
    with pytest.raises(ValueError, match="both given"):
        ModelConfig(path="folder", make=MakeConfig())


def test_auto_dtype_follows_the_device() -> None:
    model = ModelConfig(path="folder")
    assert [compute_dtype(model, kind) for kind in ("cpu", "cuda")] == [torch.float32, torch.bfloat16]
    assert compute_dtype(ModelConfig(path="folder", dtype="float32"), "cuda") is torch.float32
    with pytest.raises(ConfigError, match="model.dtype is 'int8'"):
        load_config([], ["model.path=folder", "model.dtype=int8"])


def test_a_local_folder_is_its_own_answer(tmp_path: Path) -> None:
    assert resolve_model_folder(str(tmp_path)) == tmp_path


def test_a_path_that_is_neither_folder_nor_hub_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder, nor a hub name"):
        resolve_model_folder(str(tmp_path / "absent" / "model"))


def test_a_name_that_the_hub_refuses_says_how_to_go_on() -> None:
    with pytest.raises(ValueError, match="HFValidationError.*set model.path to that folder"):
        resolve_model_folder("no--owner/no..model")


@pytest.mark.slow
def test_a_hub_name_without_a_network_says_how_to_go_on(tmp_path: Path) -> None:
    script = (
        "from spmdrl.engines.models.hf.model_folder import ModelConfig, resolve_model_folder\n"
        "try:\n    resolve_model_folder('nobody/no-such-model')\n"
        "except ValueError as error:\n    print(error)"
    )
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=offline)
    assert "nobody/no-such-model is not a folder" in result.stdout
    assert "set model.path to that folder" in result.stdout
