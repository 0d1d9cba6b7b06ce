"""Every family against transformers' own random model: logits, gradients, greedy tokens, and files both ways."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4MoeConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
)

from spmdrl.engines.generation.native.native_engine import NativeEngine
from spmdrl.engines.generation.protocol import Request
from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf.families import FAMILIES
from spmdrl.engines.models.hf.model_folder import hf_config_dict, parameter_shapes, read_config, stored_forms
from spmdrl.engines.models.hf.model_weights import write_weights
from spmdrl.engines.models.hf.weight_check import open_weights
from spmdrl.nouns.batch import WeightSlice, whole_slice
from spmdrl.nouns.settings.rollout_config import SamplingParams
from tests.engines.generation.support import small_rollout
from tests.engines.models.support import load_decoder, packed_logits, random_rows
from tests.support.chosen_device import chosen_device
from tests.support.jobs import ROOT

VOCABULARY = 61
LENGTHS = [5, 1, 23, 12]
THETA = 5000.0
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": THETA,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": THETA, "factor": 4.0, "original_max_position_embeddings": 32}
SPARSE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
PLAIN = {"rope_type": "default", "rope_theta": THETA}
GEMMA3 = {
    "head_dim": 16,
    "sliding_window": 4,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {"full_attention": PLAIN, "sliding_attention": {**PLAIN, "rope_theta": 100.0}},
    # Its embedding would be zero, and without a gradient.
    "pad_token_id": None,
}
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": THETA, "partial_rotary_factor": 0.25}
GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 4,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {"full_attention": PROPORTIONAL, "sliding_attention": {**PLAIN, "rope_theta": 100.0}},
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "final_logit_softcapping": 3.0,
    "hidden_size_per_layer_input": 0,
    "pad_token_id": None,
}
GPT_OSS = {
    "head_dim": 16,
    "intermediate_size": 24,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "swiglu_limit": 1.5,
    "rope_parameters": {**YARN, "truncate": False},
}
DELTA = {
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    # Smaller weights than the others': with theirs, both models' logits are up to 2e-4 from float64's by rounding.
    "initializer_range": 0.1,
}
SHARED = {**SPARSE, "shared_expert_intermediate_size": 20}
GLM4 = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
GROUPED = {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "q_lora_rank": 9, "routed_scaling_factor": 1.7}
# As many as a row has at most.
INDEXER = {"index_topk": 34, "index_n_heads": 2, "index_head_dim": 8}
DEEPSEEK_YARN = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 8.0, "beta_slow": 1.0}


@dataclass(frozen=True)
class Case:
    """A transformers config class and what differs from the common sizes."""

    config_class: Any
    extra: dict[str, Any]
    tied: bool = False


CASES = {
    "llama": Case(LlamaConfig, {"head_dim": 16, "rms_norm_eps": 1e-5}),
    "llama3-rope": Case(LlamaConfig, {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}),
    "llama-yarn": Case(LlamaConfig, {"rope_parameters": YARN}, tied=True),
    "llama-yarn-factor": Case(LlamaConfig, {"rope_parameters": {**YARN, "attention_factor": 0.8, "truncate": False}}),
    "mistral": Case(MistralConfig, {"head_dim": 16, "sliding_window": None}, tied=True),
    "mistral-wide-window": Case(MistralConfig, {"sliding_window": 128}),
    "mistral-window": Case(MistralConfig, {"head_dim": 16, "sliding_window": 5}),
    "qwen2-windows": Case(Qwen2Config, {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    "qwen3-moe-window": Case(
        Qwen3MoeConfig, {**SPARSE, "head_dim": 16, "use_sliding_window": True, "sliding_window": 6}
    ),
    "smollm3-windows": Case(
        SmolLM3Config,
        {"no_rope_layer_interval": 2, "pad_token_id": None, "use_sliding_window": True, "sliding_window": 4},
    ),
    "gemma3": Case(Gemma3TextConfig, GEMMA3, tied=True),
    "gemma3-untied": Case(Gemma3TextConfig, {**GEMMA3, "query_pre_attn_scalar": 24, "attention_bias": True}),
    "gemma3-ropes": Case(
        Gemma3TextConfig,
        {**GEMMA3, "rope_parameters": {"full_attention": LLAMA3, "sliding_attention": {**PLAIN, "rope_theta": 50.0}}},
    ),
    "gemma3-pattern": Case(Gemma3TextConfig, {**GEMMA3, "layer_types": None, "sliding_window_pattern": 3}, tied=True),
    "gemma4": Case(Gemma4TextConfig, GEMMA4, tied=True),
    "gemma4-values": Case(
        Gemma4TextConfig,
        {**GEMMA4, "attention_k_eq_v": False, "attention_bias": True, "final_logit_softcapping": None},
    ),
    # The last layer, too, would have a window.
    "gemma4-pattern": Case(
        Gemma4TextConfig,
        {**GEMMA4, "layer_types": None, "num_key_value_heads": 4, "num_global_key_value_heads": 2},
        tied=True,
    ),
    "gemma4-one-shape": Case(
        Gemma4TextConfig,
        {
            **GEMMA4,
            "global_head_dim": 8,
            "num_global_key_value_heads": None,
            "layer_types": ["sliding_attention"] * 4,
            "use_bidirectional_attention": "vision",
            "rope_parameters": {**GEMMA4["rope_parameters"], "full_attention": PLAIN},
        },
    ),  # fmt: skip
    "llama-proportional": Case(LlamaConfig, {"head_dim": 16, "rope_parameters": PROPORTIONAL}),
    "gpt-oss": Case(GptOssConfig, {**GPT_OSS, "sliding_window": 4}),
    "gpt-oss-plain-rope": Case(GptOssConfig, {**GPT_OSS, "sliding_window": 3, "rope_parameters": PLAIN}, tied=True),
    "gpt-oss-kinds": Case(
        GptOssConfig, {**GPT_OSS, "sliding_window": 9, "layer_types": ["full_attention"] * 2 + ["sliding_attention"]}
    ),
    "qwen3.5": Case(Qwen3_5TextConfig, {**DELTA, "head_dim": 16}, tied=True),
    "qwen3.5-heads": Case(
        Qwen3_5TextConfig, {**DELTA, "head_dim": 8, "linear_num_key_heads": 1, "linear_num_value_heads": 3}
    ),
    "qwen3.5-moe": Case(Qwen3_5MoeTextConfig, {**DELTA, **SHARED, "head_dim": 16}),
    "qwen3-next": Case(Qwen3NextConfig, {**DELTA, **SHARED, "head_dim": 16, "mlp_only_layers": [1]}),
    "glm4-moe": Case(Glm4MoeConfig, {**GLM4, "head_dim": 16, "use_qk_norm": True}),
    "glm4-moe-bias": Case(
        Glm4MoeConfig, {**GLM4, "head_dim": 8, "attention_bias": True, "partial_rotary_factor": 0.25, "n_group": 2}
    ),
    "glm-dsa": Case(
        GlmMoeDsaConfig,
        {**LATENT, **GROUPED, **INDEXER, "indexer_types": ["full", "shared", "full"], "attention_bias": True},
    ),
    "smollm3": Case(SmolLM3Config, {"no_rope_layer_interval": 2, "pad_token_id": None, "mlp_bias": True}, tied=True),
    "smollm3-untied": Case(SmolLM3Config, {"no_rope_layers": [0, 1, 1], "pad_token_id": None, "attention_bias": True}),
    "seed-oss": Case(SeedOssConfig, {"head_dim": 16, "mlp_bias": True}),
    "seed-oss-plain": Case(SeedOssConfig, {"head_dim": 8, "attention_bias": False}, tied=True),
    "qwen3-attn-factor": Case(
        Qwen3Config, {"head_dim": 16, "rope_parameters": {**YARN, "attn_factor": 0.8782488562869419}}
    ),
    "qwen2-tied": Case(Qwen2Config, {}, tied=True),
    "qwen2-untied": Case(Qwen2Config, {}),
    "qwen3": Case(Qwen3Config, {"head_dim": 16, "attention_bias": True}, tied=True),
    "qwen3-yarn": Case(Qwen3Config, {"head_dim": 16, "rope_parameters": YARN}),
    "qwen3-moe": Case(Qwen3MoeConfig, {**SPARSE, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3-moe-step": Case(Qwen3MoeConfig, {**SPARSE, "decoder_sparse_step": 2}, tied=True),
    "deepseek": Case(DeepseekV3Config, LATENT),
    "deepseek-groups": Case(DeepseekV3Config, {**LATENT, **GROUPED, "attention_bias": True}, tied=True),
    "kimi-k2-yarn": Case(DeepseekV3Config, {**LATENT, "rope_parameters": {**DEEPSEEK_YARN, "beta_fast": 1.0}}),
    "deepseek-yarn": Case(DeepseekV3Config, {**LATENT, **GROUPED, "rope_parameters": DEEPSEEK_YARN}),
    "deepseek-halves": Case(
        DeepseekV3Config, {**LATENT, "rope_interleave": False, "norm_topk_prob": False, "first_k_dense_replace": 0}
    ),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def tiny_model(case: Case) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        "initializer_range": 0.2,
        "tie_word_embeddings": case.tied,
    }
    config = case.config_class(**{**sizes, **case.extra})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            # Norms and biases start constant, which would hide that one of them is missing.
            if weight.dim() == 1 or name.endswith("_bias"):
                weight.add_(0.3 * torch.randn_like(weight))
            assert weight.numel() == 1 or weight.std() > 0, f"{name} is constant"
    return model.eval()


def mean_loss(logits: list[Tensor], rows: list[Tensor]) -> Tensor:
    targets = torch.cat([row[1:] for row in rows])
    return F.cross_entropy(torch.cat([row_logits[:-1] for row_logits in logits]), targets)


def part_of(box: WeightSlice) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in zip(box.starts, box.stops, strict=True))


def gradients_of(model: PreTrainedModel, config: DecoderConfig) -> dict[str, Tensor]:
    """transformers' gradients by the decoder's names."""
    gradients, forms, shapes = {}, stored_forms(config), parameter_shapes(config)
    for name, weight in model.named_parameters():
        rule = forms.rule_of_stored(name)
        if rule is not None:
            for ours in rule.weights(name):
                wanted = whole_slice(ours, shapes[ours])
                parts = [weight.grad[part_of(box)] for box in rule.boxes(wanted)]
                gradients[ours] = torch.cat([rule.take(wanted, part) for part in parts])
        elif name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            gradients[f"{prefix}gate_proj"], gradients[f"{prefix}up_proj"] = weight.grad.chunk(2, dim=1)
        elif weight.grad is not None:
            gradients[name] = weight.grad
    return gradients


def assert_same_logits(theirs: PreTrainedModel, folder: Path) -> None:
    rows = random_rows(LENGTHS, VOCABULARY)
    with torch.no_grad():
        for row, mine in zip(rows, packed_logits(load_decoder(folder), rows), strict=True):
            assert (theirs(row[None]).logits[0] - mine).abs().max() < 1e-4


@every_case
def test_logits_and_gradients_of_packed_rows_have_parity_with_transformers(case: Case, tmp_path: Path) -> None:
    theirs = tiny_model(case)
    theirs.save_pretrained(tmp_path)
    ours = load_decoder(tmp_path)
    rows = random_rows(LENGTHS, VOCABULARY)

    their_logits = [theirs(row[None]).logits[0] for row in rows]
    our_logits = packed_logits(ours, rows)
    for mine, reference in zip(our_logits, their_logits, strict=True):
        assert (mine - reference).abs().max() < 1e-4

    mean_loss(their_logits, rows).backward()
    mean_loss(our_logits, rows).backward()
    # An indexer's weights have none.
    weights = {name: weight for name, weight in ours.named_parameters() if weight.grad is not None}
    references = gradients_of(theirs, ours.config)
    assert set(references) == set(weights)
    # Key biases move attention only through the rotation, so their gradients can vanish beside their rounding.
    scale = max(float(reference.norm()) for reference in references.values())
    for name, weight in weights.items():
        reference = references[name]
        assert (weight.grad.cpu() - reference).norm() <= 1e-4 * max(float(reference.norm()), 1e-3 * scale), name


@every_case
def test_greedy_tokens_of_the_native_engine_have_parity_with_transformers(case: Case, tmp_path: Path) -> None:
    theirs = tiny_model(case)
    theirs.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    engine = NativeEngine(config, small_rollout(), chosen_device(), torch.float32)
    files = open_weights(tmp_path, config)
    engine.load_weights((name, files.read(whole_slice(name, shape))) for name, shape in engine.weight_shapes().items())
    engine.wake_cache()
    prompts = random_rows([3, 7, 14], VOCABULARY, seed=1)
    sampling = SamplingParams(temperature=0.0, max_tokens=20)
    engine.submit([Request((i,), tuple(prompt.tolist()), (i,), sampling) for i, prompt in enumerate(prompts)])
    found = {}
    while engine.num_unfinished:
        found.update({response.row: list(response.token_ids) for response in engine.step()})
    for row, prompt in enumerate(prompts):
        tokens = torch.cat((prompt, torch.tensor(found[row])))
        with torch.no_grad():
            # If each token is the best one after those before it, so is the whole response.
            best = theirs(tokens[None]).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert found[row] == best.tolist()


@every_case
@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000], ids=["one-file", "sharded"])
def test_what_we_write_has_parity_in_transformers(case: Case, max_shard_bytes: int, tmp_path: Path) -> None:
    source, copy, made = tmp_path / "source", tmp_path / "copy", tiny_model(case)
    made.save_pretrained(source)
    copy.mkdir()
    config, decoder = read_config(source), load_decoder(source)
    (copy / "config.json").write_text(json.dumps(hf_config_dict(config, torch.float32)))
    write_weights(copy, decoder.state_dict().items(), max_shard_bytes, forms=stored_forms(config))
    assert (copy / "model.safetensors.index.json").exists() == (max_shard_bytes == 20_000)
    assert read_config(copy) == config
    theirs, report = AutoModelForCausalLM.from_pretrained(copy, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    # An indexer's, too, on which no logit depends.
    assert all(weight.equal(made.state_dict()[name]) for name, weight in theirs.state_dict().items())
    assert_same_logits(theirs.eval(), source)


@every_case
@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
def test_what_transformers_writes_has_parity_here(case: Case, max_shard_size: str, tmp_path: Path) -> None:
    theirs = tiny_model(case)
    theirs.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    config = read_config(tmp_path)
    shapes, files = parameter_shapes(config), open_weights(tmp_path, config)
    assert files.names == sorted(shapes)
    assert {name: files.shape(name) for name in files.names} == shapes
    assert_same_logits(theirs, tmp_path)


def test_the_family_that_the_page_on_models_adds_has_parity_with_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for table in (FAMILIES, CASES):
        monkeypatch.setitem(table, "mixtral", None)
    names = dict(globals())
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "models.md").read_text(), re.DOTALL):
        exec(block, names)
    test_logits_and_gradients_of_packed_rows_have_parity_with_transformers(CASES["mixtral"], tmp_path / "logits")
    test_greedy_tokens_of_the_native_engine_have_parity_with_transformers(CASES["mixtral"], tmp_path / "tokens")
    (tmp_path / "files").mkdir()
    test_what_we_write_has_parity_in_transformers(CASES["mixtral"], 10**9, tmp_path / "files")
