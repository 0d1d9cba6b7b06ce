from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.hf import ModelConfig, hf_config_dict, read_config, resolve_model_folder
from spmdrl.engines.models.make_config import MakeConfig

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
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; supported are qwen3, qwen2, llama"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported is 'silu'"),
        ({"mlp_bias": True}, "mlp_bias True is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling of kind 'linear'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_parameters of kind 'llama3'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"use_sliding_window": True}, "window of 32768 tokens in 3 of 24 layers"),
        (
            {"use_sliding_window": True, "layer_types": ["full_attention"] * 23 + ["sliding_attention"]},
            "in 1 of 24 layers",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config 'awq'"),
        ({"vocab_size": None}, "vocab_size is None, but must be a whole number >= 1"),
        ({"hidden_size": "896"}, "hidden_size is '896'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 14 is not a multiple of num_key_value_heads 3"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        config_of(tmp_path, QWEN2 | change)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    "change", [{"attention_dropout": 0.1}, {"use_sliding_window": True, "layer_types": ["full_attention"] * 24}]
)
def test_settings_without_effect_here_are_accepted(change: dict[str, Any], tmp_path: Path) -> None:
    assert config_of(tmp_path, QWEN2 | change) == config_of(tmp_path, QWEN2)


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
    assert [model.compute_dtype(kind) for kind in ("cpu", "cuda")] == [torch.float32, torch.bfloat16]
    assert ModelConfig(path="folder", dtype="float32").compute_dtype("cuda") is torch.float32
    with pytest.raises(ValueError, match="model.dtype is 'int8'"):
        ModelConfig(path="folder", dtype="int8")  # type: ignore[arg-type]


def test_a_local_folder_is_its_own_answer(tmp_path: Path) -> None:
    assert resolve_model_folder(ModelConfig(path=str(tmp_path))) == tmp_path


def test_a_path_that_is_neither_folder_nor_hub_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a folder, nor a hub name"):
        resolve_model_folder(ModelConfig(path=str(tmp_path / "absent" / "model")))


def test_a_name_that_the_hub_refuses_says_how_to_go_on() -> None:
    with pytest.raises(ValueError, match="HFValidationError.*set model.path to that folder"):
        resolve_model_folder(ModelConfig(path="no--owner/no..model"))


@pytest.mark.slow
def test_a_hub_name_without_a_network_says_how_to_go_on(tmp_path: Path) -> None:
    script = (
        "from spmdrl.engines.models.hf import ModelConfig, resolve_model_folder\n"
        "try:\n    resolve_model_folder(ModelConfig(path='nobody/no-such-model'))\n"
        "except ValueError as error:\n    print(error)"
    )
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=offline)
    assert "nobody/no-such-model is not a folder" in result.stdout
    assert "set model.path to that folder" in result.stdout
