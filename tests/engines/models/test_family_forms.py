"""Each family's forms read what transformers writes, and transformers opens what they write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    FineGrainedFP8Config,
    Gemma3Config,
    Gemma4Config,
    GptOssConfig,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3NextConfig,
)

from spmdrl.engines.models.hf.families import FAMILIES
from spmdrl.engines.models.hf.family_forms import (
    GEMMA3_FORMS,
    GEMMA4_FORMS,
    GPT_OSS_FORMS,
    qwen3_5_forms,
    qwen3_next_forms,
)
from spmdrl.engines.models.hf.model_folder import read_config
from spmdrl.engines.models.hf.model_weights import WeightFiles, write_weights
from spmdrl.engines.models.hf.stored_forms import StoredForms
from spmdrl.engines.models.hf.weight_check import open_weights
from spmdrl.engines.models.make_model import make_model_folder
from spmdrl.nouns.batch import WeightSlice, whole_slice
from spmdrl.nouns.settings.model_config import MakeConfig
from tests.engines.models.support import load_decoder, packed_logits
from tests.support.quantized_folders import quantize_to_fp8

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
QWEN_TOWER = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
GEMMA_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
}
DENSE, SPARSE = {**SIZES, **HEADS, **DELTA, **LAYERS}, {**SIZES, **HEADS, **DELTA, **LAYERS, **EXPERTS}


@dataclass(frozen=True)
class Case:
    """A tiny model of transformers, and the forms of its folders."""

    config: Any
    forms: StoredForms

    def make(self) -> PreTrainedModel:
        torch.manual_seed(0)
        is_text = getattr(self.config, "text_config", None) is None
        return (AutoModelForCausalLM if is_text else AutoModelForImageTextToText).from_config(self.config)


CASES: dict[str, Callable[[], Case]] = {
    "qwen3_5": lambda: Case(Qwen3_5Config(text_config=DENSE, vision_config=QWEN_TOWER), qwen3_5_forms(16, 48)),
    "qwen3_5_moe": lambda: Case(Qwen3_5MoeTextConfig(**SPARSE), qwen3_5_forms(16, 48, 16)),
    "qwen3_5_moe multimodal": lambda: Case(
        Qwen3_5MoeConfig(text_config=SPARSE, vision_config=QWEN_TOWER), qwen3_5_forms(16, 48, 16)
    ),
    "qwen3_next": lambda: Case(Qwen3NextConfig(**SPARSE), qwen3_next_forms(2, 8, 4, 12)),
    "gpt_oss": lambda: Case(
        GptOssConfig(**SIZES, **HEADS, num_local_experts=4, num_experts_per_tok=2), GPT_OSS_FORMS
    ),
    "gemma3": lambda: Case(
        Gemma3Config(
            text_config={**SIZES, **HEADS}, mm_tokens_per_image=4,
            vision_config=GEMMA_TOWER | {"image_size": 28, "patch_size": 14},
        ),
        GEMMA3_FORMS,
    ),
    "gemma4": lambda: Case(
        Gemma4Config(text_config={**SIZES, **HEADS}, vision_config=GEMMA_TOWER, audio_config=None), GEMMA4_FORMS
    ),
}  # fmt: skip


def text_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of the text model, by the names of transformers' text-only class."""
    weights = {}
    for name, weight in model.state_dict().items():
        if name.startswith("model.language_model.") or not hasattr(model.model, "language_model"):
            weights[name.replace("model.language_model.", "model.")] = weight
    if not model.config.get_text_config().tie_word_embeddings:
        weights["lm_head.weight"] = model.lm_head.weight
    else:
        weights.pop("lm_head.weight", None)
    return weights


def apart(name: str, weight: Tensor, model: PreTrainedModel) -> dict[str, Tensor]:
    """A weight of transformers in the decoder's parts, cut as its modules cut their outputs."""
    stem, _, end = name.rpartition(".")
    is_gpt_oss = model.config.model_type == "gpt_oss"
    if is_gpt_oss and end == "down_proj":
        return {name: weight.mT}
    if end.startswith("gate_up_proj"):
        gate, up = (weight[..., ::2], weight[..., 1::2]) if is_gpt_oss else weight.chunk(2, 1)
        if is_gpt_oss and end == "gate_up_proj":
            gate, up = gate.mT, up.mT
        return {f"{stem}.{end.replace('gate_up', part)}": one for part, one in (("gate", gate), ("up", up))}
    stem, _, end = name.removesuffix(".weight").rpartition(".")
    if end in ("in_proj_qkv", "conv1d"):
        parts = zip("qkv", weight.split([16, 16, 48]), strict=True)
        part_of = "conv" if end == "conv1d" else "in_proj"
        return {f"{stem}.{part_of}_{part}.weight": one for part, one in parts}
    if end in ("in_proj_qkvz", "in_proj_ba"):
        # The columns of a weight are its outputs for unit vectors.
        unit = {"in_proj_qkvz": torch.zeros(1, 32, 128), "in_proj_ba": torch.zeros(1, 32, 8)} | {end: weight.T[None]}
        outputs = model.get_submodule(stem).fix_query_key_value_ordering(*unit.values())
        named = dict(zip("qkvzba", outputs, strict=True))
        return {f"{stem}.in_proj_{part}.weight": named[part][0].flatten(1).T for part in end.removeprefix("in_proj_")}
    return {name.replace(".shared_expert.", ".shared_experts.").replace(".router.", ".gate."): weight}


def read_all(files: WeightFiles) -> dict[str, Tensor]:
    return {name: files.read(whole_slice(name, files.shape(name))) for name in files.names}


@pytest.mark.parametrize("name", CASES)
def test_a_familys_forms_read_and_write_transformers_folders(name: str, tmp_path: Path) -> None:
    case = CASES[name]()
    theirs = case.make()
    theirs.save_pretrained(tmp_path / "theirs")
    expected: dict[str, Tensor] = {}
    for key, weight in text_weights(theirs).items():
        expected |= apart(key, weight, theirs)
    files = WeightFiles(tmp_path / "theirs", case.forms)
    ours = read_all(files)
    assert ours.keys() == expected.keys()
    assert all(torch.equal(weight, expected[key]) for key, weight in ours.items())
    assert bool(files.left_out) == hasattr(theirs.model, "language_model")

    stored = load_file(tmp_path / "theirs" / "model.safetensors")
    again = {key: one.clone() for key, one in files.as_stored(ours.items())}
    assert again.keys() <= stored.keys() and all(torch.equal(one, stored[key]) for key, one in again.items())

    write_weights(_folder(tmp_path / "ours"), ours.items(), forms=case.forms)
    theirs.config.get_text_config().save_pretrained(tmp_path / "ours")
    copy, report = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    reopened = text_weights(copy)
    assert all(torch.equal(weight, reopened[key]) for key, weight in text_weights(theirs).items())


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_slices_of_an_fp8_multimodal_folder_are_what_transformers_dequantizes(tmp_path: Path) -> None:
    CASES["qwen3_5_moe multimodal"]().make().save_pretrained(tmp_path)
    quantize_to_fp8(tmp_path, (4, 8), excluded=["conv1d", "shared_expert_gate", "visual"])
    theirs = AutoModelForImageTextToText.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    files = open_weights(tmp_path, read_config(tmp_path))
    expected: dict[str, Tensor] = {}
    for key, weight in text_weights(theirs).items():
        expected |= apart(key, weight, theirs)
    assert files.names == sorted(expected)
    for key, weight in expected.items():
        # An inner slice, which begins and ends within blocks and experts.
        bounds = [(size // 3, size - size // 4) for size in weight.shape]
        read = files.read(WeightSlice(key, tuple(start for start, _ in bounds), tuple(stop for _, stop in bounds)))
        assert torch.equal(read.to(weight.dtype), weight[tuple(slice(*pair) for pair in bounds)]), key


def test_experts_of_qwen3_5_are_read_fused_as_published(tmp_path: Path) -> None:
    case = CASES["qwen3_5_moe"]()
    weights = {key: weight.contiguous() for key, weight in text_weights(case.make()).items()}
    save_file(weights, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path, case.forms)
    fused = weights["model.layers.1.mlp.experts.gate_up_proj"]
    read = files.read(whole_slice("model.layers.1.mlp.experts.up_proj", (4, 16, 32)))
    assert torch.equal(read, fused[:, 16:])
    assert {name for name, _ in files.as_stored(read_all(files).items())} == set(weights)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "model.language_model.model."])
def test_gemma3_is_read_under_every_prefix_that_transformers_reads(prefix: str, tmp_path: Path) -> None:
    case = CASES["gemma3"]()
    case.make().save_pretrained(tmp_path)
    expected = read_all(WeightFiles(tmp_path, case.forms))
    path = tmp_path / "model.safetensors"
    save_file({key.replace("language_model.model.", prefix): one for key, one in load_file(path).items()}, path)
    found = read_all(WeightFiles(tmp_path, case.forms))
    assert found.keys() == expected.keys() and all(torch.equal(one, expected[key]) for key, one in found.items())


def test_the_language_model_of_a_gemma4_folder_computes_as_the_whole_one_does_on_text(tmp_path: Path) -> None:
    torch.manual_seed(0)
    dense = {"hidden_size_per_layer_input": 0, "final_logit_softcapping": 2.0, "initializer_range": 0.3}
    keys = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 16}
    text = {**SIZES, **HEADS, **dense, **keys, "use_bidirectional_attention": "vision"}
    config = Gemma4Config(text_config=text, vision_config=GEMMA_TOWER, audio_config=None)
    theirs = AutoModelForImageTextToText.from_config(config).eval()
    theirs.model.language_model.layers[0].layer_scalar.fill_(0.7)
    theirs.save_pretrained(tmp_path)
    row = torch.arange(3, 20)
    with torch.no_grad():
        expected = theirs(input_ids=row[None], mm_token_type_ids=torch.zeros_like(row)[None]).logits[0]
        [found] = packed_logits(load_decoder(tmp_path), [row])
    assert (found - expected).abs().max() < 1e-5


def test_missing_and_surplus_weights_are_named_as_files_name_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms = qwen3_5_forms(16, 48, 16)
    fused_first = StoredForms(tuple(reversed(forms.rules)))
    monkeypatch.setitem(FAMILIES, "qwen3_moe", replace(FAMILIES["qwen3_moe"], stored=lambda config: fused_first))
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_experts": 4, "moe_intermediate_size": 16}
    make_model_folder(tmp_path / "model", MakeConfig(model_type="qwen3_moe", **sizes), seed=0)
    config, path = read_config(tmp_path / "model"), tmp_path / "model" / "model.safetensors"
    open_weights(tmp_path / "model", config)
    tensors = load_file(path)
    gate_up = "model.layers.1.mlp.experts.gate_up_proj"
    tensors[gate_up.replace("1", "7")] = tensors.pop(gate_up)
    save_file(tensors, path)
    names = rf"lacks {gate_up} and holds {gate_up.replace('1', '7')}, for which the config has no place"
    with pytest.raises(ValueError, match=names):
        open_weights(tmp_path / "model", config)
