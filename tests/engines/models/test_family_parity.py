"""Variants of the newer families against transformers: logits, gradients by name, and long greedy responses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4MoeConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    PreTrainedModel,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.models.hf.model_folder import read_config
from spmdrl.engines.models.hf.weight_check import open_weights
from spmdrl.nouns.batch import whole_slice
from spmdrl.nouns.settings.rollout_config import SamplingParams
from tests.engines.generation.support import request, run, small_rollout
from tests.engines.models.support import load_decoder, packed_logits, random_rows
from tests.engines.models.test_transformers_parity import (
    DEEPSEEK_YARN,
    DELTA,
    GEMMA3,
    GEMMA4,
    GLM4,
    GPT_OSS,
    GROUPED,
    INDEXER,
    LATENT,
    LLAMA3,
    PLAIN,
    PROPORTIONAL,
    SHARED,
    THETA,
    VOCABULARY,
    YARN,
    Case,
    gradients_of,
    mean_loss,
    tiny_model,
)
from tests.support.chosen_device import chosen_device

LENGTHS = [5, 1, 23, 70, 12]
LINEAR = {"rope_type": "linear", "rope_theta": THETA, "factor": 8.0}
FULL, WINDOWED, DELTAS = "full_attention", "sliding_attention", "linear_attention"
DELTA_NET = dict.fromkeys(
    ("A_log", "dt_bias", "conv_q.weight", "conv_k.weight", "conv_v.weight", "linear_attn.norm.weight"), DELTAS
)

# With larger weights both models' log-probs would be 1e-5 and more from those in float64, transformers' further.
HYBRID = {**DELTA, "head_dim": 16, "initializer_range": 0.05}


def gemma_ropes(full: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {FULL: full, WINDOWED: {**PLAIN, "rope_theta": 50.0}}}


def partly(share: float, rope: dict[str, Any] = PLAIN) -> dict[str, Any]:
    return {"rope_parameters": {**rope, "partial_rotary_factor": share}}


def partly_proportional(share: float) -> dict[str, Any]:
    return gemma_ropes({**PROPORTIONAL, "partial_rotary_factor": share})


def heads(queries: int, keys: int, size: int = 16) -> dict[str, Any]:
    return {"num_attention_heads": queries, "num_key_value_heads": keys, "head_dim": size}


def delta_heads(keys: int, values: int, **sizes: int) -> dict[str, Any]:
    return {"linear_num_key_heads": keys, "linear_num_value_heads": values, **sizes}


def latents(query_rank: int, key_value_rank: int, plain: int, rotary: int, value: int) -> dict[str, Any]:
    ranks = {"q_lora_rank": query_rank, "kv_lora_rank": key_value_rank}
    return {**ranks, "qk_nope_head_dim": plain, "qk_rope_head_dim": rotary, "v_head_dim": value}


def anywhere(*weights: str) -> dict[str, str]:
    return dict.fromkeys(weights, "")


def kinds(*layers: str) -> dict[str, Any]:
    return {"layer_types": list(layers), "num_hidden_layers": len(layers)}


@dataclass(frozen=True)
class Base:
    """What a family's variants have in common."""

    config_class: Any
    common: dict[str, Any]
    weights: dict[str, str]
    """Ends of the names of weights that its models have in layers of a kind, so that none is left out unseen."""


BASES = {
    "gemma3": Base(
        Gemma3TextConfig,
        {**GEMMA3, "tie_word_embeddings": True},
        anywhere("q_norm.weight", "pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"),
    ),
    "gemma4": Base(
        Gemma4TextConfig,
        {**GEMMA4, "tie_word_embeddings": True},
        {**anywhere("q_norm.weight", "post_feedforward_layernorm.weight"), "v_proj.weight": WINDOWED},
    ),
    "gpt_oss": Base(
        GptOssConfig, {**GPT_OSS, "sliding_window": 4}, anywhere("sinks", "gate.bias", "experts.down_proj_bias")
    ),
    "glm4_moe": Base(Glm4MoeConfig, {**GLM4, "head_dim": 16}, anywhere("gate.weight", "shared_experts.up_proj.weight")),
    # All rows are within index_topk.
    "glm_moe_dsa": Base(
        GlmMoeDsaConfig,
        {**LATENT, **INDEXER, "q_lora_rank": 9, "index_topk": 256, "routed_scaling_factor": 1.7},
        anywhere("q_a_layernorm.weight", "kv_b_proj.weight", "shared_experts.up_proj.weight"),
    ),
    "qwen3_5": Base(Qwen3_5TextConfig, HYBRID, {"q_norm.weight": FULL, **DELTA_NET}),
    "qwen3_5_moe": Base(
        Qwen3_5MoeTextConfig,
        {**HYBRID, **SHARED},
        {**anywhere("shared_expert_gate.weight"), "k_norm.weight": FULL, **DELTA_NET},
    ),
    "qwen3_next": Base(
        Qwen3NextConfig,
        {**HYBRID, **SHARED},
        {**anywhere("shared_expert_gate.weight"), "k_norm.weight": FULL, **DELTA_NET},
    ),
}
# Differences from a family's sizes; the first two of each family are always run.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "gemma3": {
        "linear rope, one key head": {**gemma_ropes(LINEAR), **heads(4, 1), "query_pre_attn_scalar": 24},
        "untied, biases, a pattern": {
            "tie_word_embeddings": False, "attention_bias": True, "layer_types": None, "sliding_window_pattern": 3,
        },
        "yarn rope, own key heads": {**gemma_ropes(YARN), **heads(4, 4, 8)},
        "llama3 rope, a large eps": {**gemma_ropes(LLAMA3), "rms_norm_eps": 1e-2},
        "a window of one token": {"sliding_window": 1, "query_pre_attn_scalar": 9},
        "windows only": kinds(WINDOWED, WINDOWED, WINDOWED),
        "no windows": kinds(FULL, FULL),
        "published pattern": {"layer_types": None, "num_hidden_layers": 7, "sliding_window": 9},
        "windows no row fills": {"sliding_window": 300, **heads(2, 1, 24)},
    },
    "gemma4": {
        "untied, values of their own, one key head": {
            "tie_word_embeddings": False, "attention_k_eq_v": False, **heads(4, 1, 12), "global_head_dim": 20,
        },
        "biases, more key heads without a window, half rotates": {
            "attention_bias": True, **heads(4, 1, 8), "num_global_key_value_heads": 2, **partly_proportional(0.5),
        },
        "own key heads, smaller without a window": {
            **heads(4, 4), "global_head_dim": 8, "num_global_key_value_heads": 4, "final_logit_softcapping": None,
        },
        "a plain rotation, as many key heads": {**gemma_ropes(PLAIN), "num_global_key_value_heads": None},
        "an uneven share rotates": {**partly_proportional(0.3), "global_head_dim": 24, **heads(2, 2, 6)},
        "the last layer alone without a window": kinds(WINDOWED, WINDOWED, FULL),
        "no windows, the published soft cap": {**kinds(FULL, FULL, FULL), "final_logit_softcapping": 30.0},
        "published pattern": {"layer_types": None, "num_hidden_layers": 7, "sliding_window": 9},
        "a window of one token, a large eps": {"sliding_window": 1, "rms_norm_eps": 1e-2},
        "windows no row fills": {"sliding_window": 300, "attention_k_eq_v": False, **heads(2, 1, 24)},
    },
    "gpt_oss": {
        "one expert, one key head": {"num_experts_per_tok": 1, **heads(4, 1), "sliding_window": 5},
        "llama3 rope, all experts": {"rope_parameters": LLAMA3, "num_experts_per_tok": 6, "swiglu_limit": 0.5},
        "tied, own key heads": {"tie_word_embeddings": True, **heads(4, 4, 8), "rms_norm_eps": 1e-2},
        "windows only": kinds(WINDOWED, WINDOWED),
        "no windows": kinds(FULL, FULL, FULL),
        "no attention biases": {"attention_bias": False, "sliding_window": 1},
        "another gate": {"swiglu_alpha": 1.0, "swiglu_limit": 7.0, "intermediate_size": 8},
        "linear rope, an odd number of experts": {
            "rope_parameters": LINEAR, "num_local_experts": 7, "num_experts_per_tok": 3,
        },
        "truncated yarn": {"rope_parameters": {**YARN, "attention_factor": 0.8}, **heads(8, 2, 6)},
    },
    "glm4_moe": {
        "groups, norms": {**GROUPED, "use_qk_norm": True},
        "whole rotation, biases, one key head": {**partly(1.0), "attention_bias": True, **heads(4, 1)},
        "yarn rope": {**partly(0.5, YARN), **heads(4, 4, 8)},
        "llama3 rope": {**partly(0.5, LLAMA3), "use_qk_norm": True, "rms_norm_eps": 1e-2},
        "linear rope": {**partly(0.5, LINEAR), "n_shared_experts": 3},
        "one expert, as it is, after two dense layers": {
            "num_experts_per_tok": 1, "norm_topk_prob": False, "first_k_dense_replace": 2,
        },
        "tied, no dense layer": {"tie_word_embeddings": True, "first_k_dense_replace": 0, "n_routed_experts": 5},
        "a quarter rotates": {**partly(0.25), **heads(2, 2, 24), "routed_scaling_factor": 2.5},
        "one group of two": {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 4, "n_routed_experts": 10},
    },
    "glm_moe_dsa": {
        "groups, one choice for three layers": {
            **GROUPED, "num_hidden_layers": 4, "index_topk_pattern": "FSSF", "num_experts_per_tok": 4,
        },
        "biases, values as wide as queries, no dense layer": {
            "attention_bias": True, **latents(12, 7, 6, 4, 10), "first_k_dense_replace": 0, "n_shared_experts": 3,
        },
        "yarn rope": {"rope_parameters": DEEPSEEK_YARN, "index_topk_freq": 2},
        "llama3 rope, narrow ranks, mostly rotated": {"rope_parameters": LLAMA3, **latents(3, 2, 2, 8, 3)},
        "linear rope, eight heads": {
            "rope_parameters": LINEAR, "num_attention_heads": 8, "num_key_value_heads": 8, "index_n_heads": 1,
        },
        "two heads, a wide indexer": {
            **latents(20, 24, 16, 6, 12), "num_attention_heads": 2, "num_key_value_heads": 2, "index_n_heads": 5,
            "index_head_dim": 14,
        },
        "one expert, as it is": {"num_experts_per_tok": 1, "norm_topk_prob": False, "routed_scaling_factor": 2.5},
        "all experts": {"n_routed_experts": 5, "num_experts_per_tok": 5, "moe_intermediate_size": 20},
        "one group of two": {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 4, "n_routed_experts": 10},
        "tied, two dense layers, a large eps": {
            "tie_word_embeddings": True, "mlp_layer_types": ["dense", "dense", "sparse"], "rms_norm_eps": 1e-2,
        },
        "an indexer for the longest row": {"index_topk": 190, "max_position_embeddings": 400},
    },
    "qwen3_5": {
        "ratio 1, two columns": {**delta_heads(2, 2, linear_conv_kernel_dim=2), "tie_word_embeddings": True},
        "ratio 4, one attention layer, axes of images": {
            **delta_heads(1, 4), "full_attention_interval": 4,
            "rope_parameters": {
                **PLAIN, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True,
            },
        },
        "whole rotation, biases": {**partly(1.0), "attention_bias": True, **heads(4, 4, 8)},
        "attention first and last": kinds(FULL, DELTAS, DELTAS, FULL),
        "attention only": kinds(FULL, FULL),
        "delta nets only": kinds(DELTAS, DELTAS),
        "yarn rope, one key head": {**partly(0.5, YARN), **heads(4, 1)},
        "llama3 rope, wide keys": {
            **partly(0.5, LLAMA3), "linear_key_head_dim": 20, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 5,
        },
        "a large eps": {"rms_norm_eps": 1e-2, **heads(2, 1, 24), **delta_heads(3, 6)},
    },
    "qwen3_5_moe": {
        "ratio 1, one expert": {**delta_heads(4, 4), "num_experts_per_tok": 1, "tie_word_embeddings": True},
        "ratio 4, three columns": {**delta_heads(1, 4, linear_conv_kernel_dim=3), **partly(0.5), "num_experts": 5},
        "all experts": {"num_experts_per_tok": 6, **heads(4, 4, 8)},
        "a wide shared expert": {"shared_expert_intermediate_size": 40, "moe_intermediate_size": 8},
        "attention only": kinds(FULL, FULL),
        "delta nets only": kinds(DELTAS, DELTAS),
        "yarn rope": {**partly(0.5, YARN), **heads(4, 1)},
        "linear rope, a large eps": {**partly(1.0, LINEAR), "rms_norm_eps": 1e-2},
        "many experts": {"num_experts": 20, "num_experts_per_tok": 8, "attention_bias": True},
    },
    "qwen3_next": {
        "ratio 1, unnormalized": {**delta_heads(2, 2), "norm_topk_prob": False},
        "ratio 4, every other layer sparse": {**delta_heads(1, 4, linear_conv_kernel_dim=2), "decoder_sparse_step": 2},
        "dense layers by number": {"mlp_only_layers": [0, 3], "num_experts_per_tok": 1, "tie_word_embeddings": True},
        "whole rotation, biases": {**partly(1.0), "attention_bias": True, **heads(4, 4, 8)},
        "attention first and last": kinds(FULL, DELTAS, DELTAS, FULL),
        "delta nets only": kinds(DELTAS, DELTAS),
        "yarn rope, one key head": {**partly(0.5, YARN), **heads(4, 1)},
        "llama3 rope, wide keys": {
            **partly(0.5, LLAMA3), "linear_key_head_dim": 20, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 5,
        },
        "all experts, a large eps": {"num_experts_per_tok": 6, "rms_norm_eps": 1e-2, **delta_heads(3, 6)},
    },
}  # fmt: skip


def variants() -> Iterator[Any]:
    for family, by_name in VARIANTS.items():
        for number, (name, changes) in enumerate(by_name.items()):
            marks = [] if number < 2 else [pytest.mark.slow]
            yield pytest.param(family, changes, id=f"{family}: {name}", marks=marks)


every_variant = pytest.mark.parametrize(("family", "changes"), list(variants()))


def theirs_in(folder: Path, family: str, changes: dict[str, Any]) -> PreTrainedModel:
    """transformers' model, saved in the folder."""
    common = {**BASES[family].common, "max_position_embeddings": 256, **changes}
    tied = common.pop("tie_word_embeddings", False)
    model = tiny_model(Case(BASES[family].config_class, common, tied=tied))
    model.save_pretrained(folder)
    return model


@every_variant
def test_logits_and_gradients_of_every_weight_have_parity(family, changes, tmp_path):
    theirs, rows = theirs_in(tmp_path, family, changes), random_rows(LENGTHS, VOCABULARY)
    ours = load_decoder(tmp_path)
    their_logits, our_logits = [theirs(row[None], use_cache=False).logits[0] for row in rows], packed_logits(ours, rows)
    for mine, reference in zip(our_logits, their_logits, strict=True):
        assert (mine - reference).abs().max() <= 1e-5 * reference.abs().max()
    mean_loss(their_logits, rows).backward()
    mean_loss(our_logits, rows).backward()
    # An indexer's weights have no gradient.
    weights = {name: weight for name, weight in ours.named_parameters() if ".indexer." not in name}
    references = gradients_of(theirs, ours.config)
    assert references.keys() == weights.keys()
    layers = "".join(getattr(theirs.config, "layer_types", []))
    for suffix, kind in BASES[family].weights.items():
        assert kind not in layers or any(name.endswith(suffix) for name in weights), suffix
    # Some gradients vanish beside their rounding, as of queries that see one key, or of decays that are 0 already.
    scale = max(float(reference.norm()) for reference in references.values())
    for name, weight in weights.items():
        reference = references[name]
        assert (weight.grad.cpu() - reference).norm() <= 1e-4 * max(float(reference.norm()), 5e-3 * scale), name


@every_variant
def test_120_greedy_tokens_have_parity(family, changes, tmp_path):
    theirs = theirs_in(tmp_path, family, changes)
    config = read_config(tmp_path)
    engine = NativeEngine(config, small_rollout(), chosen_device(), torch.float32)
    files = open_weights(tmp_path, config)
    engine.load_weights((name, files.read(whole_slice(name, shape))) for name, shape in engine.weight_shapes().items())
    engine.wake_cache()
    prompts = [tuple(prompt.tolist()) for prompt in random_rows([3, 14, 70], VOCABULARY, seed=1)]
    sampling = SamplingParams(temperature=0.0, max_tokens=120)
    found = run(engine, [request(prompt, [row], sampling) for row, prompt in enumerate(prompts)])
    for row, prompt in enumerate(prompts):
        tokens = torch.tensor([*prompt, *found[row].token_ids])
        with torch.no_grad():
            # If each token is the best one after those before it, so is the whole response.
            best = theirs(tokens[None], use_cache=False).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert found[row].token_ids == tuple(best.tolist())
