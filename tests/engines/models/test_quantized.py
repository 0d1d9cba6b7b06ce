"""Quantized folders are read as transformers dequantizes them, slice by slice, and written back in 16 bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    FineGrainedFP8Config,
    GptOssConfig,
    Mxfp4Config,
    PreTrainedModel,
    Qwen3Config,
)
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from spmdrl.engines.models.hf.model_folder import hf_config_dict, read_config, stored_forms
from spmdrl.engines.models.hf.model_weights import WeightFiles, write_weights
from spmdrl.engines.models.hf.quantized import DequantizedFiles, read_quantization
from spmdrl.engines.models.hf.tensor_files import TensorFiles
from spmdrl.engines.models.hf.weight_check import open_weights
from spmdrl.nouns.batch import WeightSlice, whole_slice
from tests.engines.models.test_transformers_parity import CASES, LATENT, Case, tiny_model
from tests.support.quantized_folders import fp8_of, mxfp4_of, quantize_to_fp8, quantize_to_mxfp4

BLOCK = (4, 8)
# Sizes of whole blocks: transformers divides rows and columns evenly among the scales.
WHOLE_BLOCKS = LATENT | {"kv_lora_rank": 16, "qk_nope_head_dim": 4, "v_head_dim": 8, "moe_intermediate_size": 16}
FP8_CASES = {
    "qwen3": Case(Qwen3Config, {"head_dim": 16}, tied=True),
    "qwen3-moe": Case(CASES["qwen3-moe"].config_class, CASES["qwen3-moe"].extra | {"moe_intermediate_size": 16}),
    "deepseek": Case(DeepseekV3Config, WHOLE_BLOCKS),
}


def by_our_names(model: PreTrainedModel) -> dict[str, Tensor]:
    weights = {}
    for name, weight in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            weights[f"{prefix}gate_proj"], weights[f"{prefix}up_proj"] = weight.chunk(2, dim=1)
        elif not (name == "lm_head.weight" and model.config.tie_word_embeddings):
            weights[name] = weight
    return weights


def whole_weights(files: WeightFiles) -> dict[str, Tensor]:
    return {name: files.read(whole_slice(name, files.shape(name))) for name in files.names}


@pytest.mark.parametrize("name", FP8_CASES)
def test_fp8_folders_equal_transformers_to_the_bit_and_are_written_in_16_bits(name: str, tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    tiny_model(FP8_CASES[name]).save_pretrained(source, max_shard_size="40KB")
    quantize_to_fp8(source, BLOCK, excluded=["model.layers.0.self_attn.o_proj"])
    dequantize = FineGrainedFP8Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, quantization_config=dequantize)
    theirs = by_our_names(model)
    config = read_config(source)
    files = open_weights(source, config)
    assert files.main_dtype == "fp8"
    ours = whole_weights(files)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(weight, theirs[key].to(weight.dtype)) for key, weight in ours.items())

    copy.mkdir()
    write_weights(copy, ours.items(), forms=stored_forms(config))
    (copy / "config.json").write_text(json.dumps(hf_config_dict(config, torch.bfloat16)))
    assert "quantization_config" not in json.loads((copy / "config.json").read_text())
    written, report = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.bfloat16, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert all(torch.equal(weight, theirs[key]) for key, weight in by_our_names(written).items())


def opened(folder: Path, tensors: dict[str, Tensor], config: dict[str, object]) -> DequantizedFiles:
    save_file(tensors, folder / "model.safetensors")
    quantization = read_quantization({"quantization_config": config})
    assert quantization is not None
    return DequantizedFiles(TensorFiles(folder), quantization)


FP8 = {"quant_method": "fp8", "weight_block_size": [3, 4]}
Made = tuple[DequantizedFiles, Tensor]


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Stacked matrices whose last blocks are smaller."""
    values, scales = fp8_of(torch.randn(2, 11, 10), (3, 4))
    factors = scales.repeat_interleave(3, -2)[:, :11].repeat_interleave(4, -1)[..., :10]
    expected = (values.float() * factors).bfloat16()
    return opened(tmp_path_factory.mktemp("fp8"), {"w": values, "w_scale_inv": scales}, FP8), expected


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Made:
    blocks, scales = mxfp4_of(torch.randn(2, 96, 7))
    expected = convert_moe_packed_tensors(blocks, scales)
    tensors = {"w_blocks": blocks, "w_scales": scales}
    return opened(tmp_path_factory.mktemp("mxfp4"), tensors, {"quant_method": "mxfp4"}), expected


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
@given(data=st.data())
def test_any_slice_is_dequantized_by_itself(method: str, data: st.DataObject, fp8: Made, mxfp4: Made) -> None:
    files, expected = {"fp8": fp8, "mxfp4": mxfp4}[method]
    assert files.shape("w") == expected.shape and files.dtype("w") == "BF16" and files.names == ["w"]
    bounds = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in expected.shape]
    read = files.read(WeightSlice("w", tuple(start for start, _ in bounds), tuple(stop for _, stop in bounds)))
    found = expected[tuple(slice(*pair) for pair in bounds)]
    assert read.dtype is torch.bfloat16 and read.shape == found.shape and torch.equal(read, found)


def test_every_byte_and_exponent_of_mxfp4_equals_transformers_to_the_bit(tmp_path: Path) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).repeat(1, 1, 16)
    files = opened(tmp_path, {"w_blocks": blocks, "w_scales": scales}, {"quant_method": "mxfp4"})
    expected = convert_moe_packed_tensors(blocks, scales)
    # As integers, as some of them are NaN and some negative zero.
    read = files.read(whole_slice("w", expected.shape)).contiguous()
    assert torch.equal(read.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_float8_times_a_factor_equals_transformers_to_the_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes[(codes & 127) != 127].view(torch.float8_e4m3fn).repeat(18, 1)[:, :252].contiguous()
    scales = (torch.rand(6, 63) * 3).to(dtype)
    files = opened(tmp_path, {"w": values, "w_scale_inv": scales}, FP8)
    expected = Fp8Dequantize(None)._dequantize_one(values, scales, torch.bfloat16)
    assert torch.equal(files.read(whole_slice("w", (18, 252))), expected)


def test_mxfp4_folders_of_gpt_oss_equal_transformers_to_the_bit_and_are_written_in_16_bits(tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    sizes = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    AutoModelForCausalLM.from_config(GptOssConfig(**sizes, **heads), dtype=torch.float32).save_pretrained(source)
    quantize_to_mxfp4(source)
    dequantize = Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, quantization_config=dequantize)
    theirs = model.state_dict()
    config = read_config(source)
    files = open_weights(source, config)
    up = files.read(WeightSlice("model.layers.1.mlp.experts.up_proj", (1, 3, 0), (3, 9, 64)))
    assert torch.equal(up, theirs["model.layers.1.mlp.experts.gate_up_proj"][1:3, :, 1::2].mT[:, 3:9])

    copy.mkdir()
    write_weights(copy, whole_weights(files).items(), forms=stored_forms(config))
    (copy / "config.json").write_text(json.dumps(hf_config_dict(config, torch.bfloat16)))
    written = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.bfloat16).state_dict()
    assert written.keys() == theirs.keys() and all(torch.equal(one, theirs[name]) for name, one in written.items())


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, object], dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("qwen3")
    tiny_model(FP8_CASES["qwen3"]).save_pretrained(folder)
    quantize_to_fp8(folder, BLOCK)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


Q = "model.layers.1.self_attn.q_proj.weight"
BROKEN: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "no scales": (lambda tensors: tensors.pop(f"{Q}_scale_inv"), f"{Q} in .* is stored as F8_E4M3, but weights are"),
    "no values": (lambda tensors: tensors.pop(Q), f"lacks {Q} and holds {Q}_scale_inv, for which"),
    "values in 16 bits": (
        lambda tensors: tensors.update({Q: tensors[Q].bfloat16()}), f"{Q} in .* stored as BF16, but fp8 has F8_E4M3"
    ),
    "scales of bytes": (
        lambda tensors: tensors.update({f"{Q}_scale_inv": tensors[f"{Q}_scale_inv"].to(torch.uint8)}),
        f"{Q}_scale_inv in .* stored as U8, but fp8 has F32 or BF16 or F16",
    ),
    "too few scales": (
        lambda tensors: tensors.update({f"{Q}_scale_inv": tensors[f"{Q}_scale_inv"][1:].clone()}),
        r"q_proj.weight_scale_inv in .* has shape \(15, 4\), which doesn't fit .* of shape \(64, 32\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_quantized_weights_are_named(
    kind: str, qwen3: tuple[dict[str, object], dict[str, Tensor]], tmp_path: Path
) -> None:
    config, tensors = qwen3[0], dict(qwen3[1])
    change, message = BROKEN[kind]
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        open_weights(tmp_path, read_config(tmp_path))


def open_excluding(module: str, stored: tuple[dict[str, object], dict[str, Tensor]], folder: Path) -> WeightFiles:
    config, tensors = json.loads(json.dumps(stored[0])), stored[1]
    config["quantization_config"]["modules_to_not_convert"] = [module]
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return open_weights(folder, read_config(folder))


@pytest.mark.parametrize(
    "module", ["q_proj", "model.layers.1", "model.layers.*.self_attn", "model.layers.1.self_attn.q_proj"]
)
def test_a_quantized_weight_of_an_excluded_module_is_refused(
    module: str, qwen3: tuple[dict[str, object], dict[str, Tensor]], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="is quantized, but its module is in quantization_config's modules_to_not"):
        open_excluding(module, qwen3, tmp_path)


@pytest.mark.parametrize("module", ["lm_head", "model.layers.1.self", "model.layers.*.mlp.up", "layers.1", "o"])
def test_modules_of_similar_names_are_not_excluded(
    module: str, qwen3: tuple[dict[str, object], dict[str, Tensor]], tmp_path: Path
) -> None:
    files = open_excluding(module, qwen3, tmp_path)
    assert files.dtype("model.layers.1.self_attn.q_proj.weight") == "BF16"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq"}, "quantization_config 'gptq' is not supported; supported are 'fp8' and 'mxfp4'"),
        ({}, "quantization_config None is not supported"),
        ({"quant_method": "fp8"}, "weight_block_size is None, but must be the rows and columns of a block"),
        ({**FP8, "activation_scheme": "static"}, "activation_scheme 'static' is not supported"),
        ({**FP8, "fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
        ({**FP8, "modules_to_not_convert": [1]}, "modules_to_not_convert is .1., but must be a list of str"),
    ],
)
def test_other_methods_are_refused_by_name(config: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_quantization({"quantization_config": config})


def test_a_nan_among_quantized_weights_is_named(tmp_path: Path) -> None:
    values = torch.ones(3, 4).to(torch.float8_e4m3fn)
    values.view(torch.uint8)[1, 2] = 127
    save_file({"w": values, "w_scale_inv": torch.ones(1, 1)}, tmp_path / "model.safetensors")
    files = WeightFiles(tmp_path, quantization=read_quantization({"quantization_config": FP8}))
    with pytest.raises(ValueError, match="model.safetensors: w holds NaN or infinity"):
        files.read(whole_slice("w", (3, 4)))
