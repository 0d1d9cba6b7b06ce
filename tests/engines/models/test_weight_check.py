"""A folder's weights are read only where their names and whole shapes are those of its config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from spmdrl.engines.models.hf.model_folder import read_config
from spmdrl.engines.models.hf.weight_check import open_weights
from tests.engines.models.support import load_decoder, packed_logits, random_rows
from tests.engines.models.test_transformers_parity import CASES, VOCABULARY, tiny_model
from tests.engines.models.weight_folders import SINGLE, ModelFolder

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelFolder]:
    found = {}
    for name in ("llama", "qwen2-tied", "qwen3-moe", "deepseek"):
        folder = tmp_path_factory.mktemp(name)
        tiny_model(CASES[name]).save_pretrained(folder)
        found[name] = ModelFolder.read(folder)
    return found


def opened(folder: ModelFolder, path: Path) -> None:
    folder.write(path / "folder")
    open_weights(path / "folder", read_config(path / "folder"))


SMALLER = [
    ("llama", {"vocab_size": 60}, "lm_head.weight in .* shape .61, 32., but config.json makes it .60, 32."),
    ("llama", {"hidden_size": 28}, "shape .* but config.json makes it"),
    ("llama", {"intermediate_size": 40}, "mlp.down_proj.weight in .* makes it .32, 40."),
    ("llama", {"num_attention_heads": 2}, "self_attn.o_proj.weight in .* makes it .32, 32."),
    ("llama", {"num_key_value_heads": 1}, "self_attn.k_proj.weight in .* makes it .16, 32."),
    ("llama", {"head_dim": 8}, "self_attn.k_proj.weight in .* makes it .16, 32."),
    ("llama", {"num_hidden_layers": 2}, "holds model.layers.2.input_layernorm.weight, .* and 6 more, for which"),
    (
        "qwen3-moe",
        {"num_experts": 5, "num_local_experts": 5},
        "mlp.experts.down_proj in .* shape .6, 32, 12., .* makes it .5, 32, 12.",
    ),
    ("deepseek", {"num_hidden_layers": 2}, "holds model.layers.2.input_layernorm.weight"),
    ("deepseek", {"kv_lora_rank": 9}, "kv_a_layernorm.weight in .* makes it .9,."),
]


@pytest.mark.parametrize(("family", "change", "message"), SMALLER, ids=[str(change) for _, change, _ in SMALLER])
def test_a_config_smaller_than_the_weights_is_refused(
    family: str, change: dict[str, Any], message: str, written: dict[str, ModelFolder], tmp_path: Path
) -> None:
    folder = written[family].copy()
    folder.config |= change
    with pytest.raises(ValueError, match=message):
        opened(folder, tmp_path)


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.q_norm.weight", "lm_head.bias",
     "model.layers.3.mlp.up_proj.weight", "v_head.summary.weight", "model.layers.0.mlp.up_proj.weight_scale_inv"],
)  # fmt: skip
def test_weights_that_the_config_has_no_place_for_are_refused(
    name: str, written: dict[str, ModelFolder], tmp_path: Path
) -> None:
    folder = written["llama"].copy()
    folder.files[SINGLE][name] = torch.ones(4)
    with pytest.raises(ValueError, match=f"holds {name}, for which the config has no place"):
        opened(folder, tmp_path)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.rotary_emb.inv_freq", "score.weight"])
def test_leftovers_that_change_nothing_are_left_out(name: str, written: dict[str, ModelFolder], tmp_path: Path) -> None:
    folder = written["llama"].copy()
    folder.files[SINGLE][name] = torch.ones(4)
    opened(folder, tmp_path)


def test_an_indexer_is_left_out_in_layers_that_use_the_choice_of_another(tmp_path: Path) -> None:
    tiny_model(CASES["glm-dsa"]).save_pretrained(tmp_path / "made")
    folder = ModelFolder.read(tmp_path / "made")
    weights = folder.files[SINGLE]
    weights["model.layers.1.self_attn.indexer.wk.weight"] = weights["model.layers.0.self_attn.indexer.wk.weight"]
    opened(folder, tmp_path)
    weights["model.layers.0.self_attn.indexer.other"] = torch.zeros(2)
    with pytest.raises(ValueError, match="holds model.layers.0.self_attn.indexer.other, for which the config"):
        opened(folder, tmp_path / "made")


def test_layers_that_predict_further_tokens_are_left_out_where_the_config_announces_them(
    written: dict[str, ModelFolder], tmp_path: Path
) -> None:
    folder = written["deepseek"].copy()
    folder.files[SINGLE] |= {f"model.layers.3.{name}.weight": torch.ones(4) for name in ("eh_proj", "mlp.up_proj")}
    folder.config["num_nextn_predict_layers"] = 1
    opened(folder, tmp_path)
    folder.config["num_nextn_predict_layers"] = 0
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="holds model.layers.3.eh_proj.weight, model.layers.3.mlp.up_proj.weight, for"):
        opened(folder, tmp_path / "none")


def test_missing_weights_are_named_and_a_missing_head_with_its_cure(
    written: dict[str, ModelFolder], tmp_path: Path
) -> None:
    folder = written["llama"].copy()
    del folder.files[SINGLE]["lm_head.weight"]
    with pytest.raises(ValueError, match='lacks lm_head.weight; .* "tie_word_embeddings": true'):
        opened(folder, tmp_path)
    del folder.files[SINGLE]["model.norm.weight"]
    folder.files[SINGLE]["norm.weight"] = torch.ones(32)
    (tmp_path / "renamed").mkdir()
    with pytest.raises(ValueError, match="lacks lm_head.weight, model.norm.weight and holds norm.weight, for which"):
        opened(folder, tmp_path / "renamed")


def test_weights_of_whole_numbers_are_refused(written: dict[str, ModelFolder], tmp_path: Path) -> None:
    folder = written["llama"].copy()
    folder.files[SINGLE]["model.norm.weight"] = torch.ones(32, dtype=torch.int8)
    with pytest.raises(ValueError, match="model.norm.weight in .* is stored as I8"):
        opened(folder, tmp_path)


def test_experts_of_different_shapes_or_dtypes_are_refused(written: dict[str, ModelFolder], tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    for number, value in enumerate((torch.ones(11, 32), torch.ones(12, 32, dtype=torch.float16))):
        folder = written["qwen3-moe"].copy()
        folder.files[SINGLE][name] = value
        (tmp_path / str(number)).mkdir()
        with pytest.raises(ValueError, match=f"{name} in .*, but .*experts.0.up_proj.weight is"):
            opened(folder, tmp_path / str(number))


def test_an_index_that_disagrees_with_its_files_is_refused(written: dict[str, ModelFolder], tmp_path: Path) -> None:
    tensors = written["llama"].files[SINGLE]
    parts = {"a.safetensors": dict(list(tensors.items())[:9]), "b.safetensors": dict(list(tensors.items())[9:])}
    places = {name: file for file, part in parts.items() for name in part}
    ModelFolder(written["llama"].config, parts, {"weight_map": places}).write(tmp_path / "right")
    open_weights(tmp_path / "right", read_config(tmp_path / "right"))
    moved, unlisted = {**places, EMBEDDING: "b.safetensors"}, {**places}
    del unlisted["model.norm.weight"]
    for number, (weight_map, message) in enumerate(
        [(moved, f"disagree: {EMBEDDING} is only in"), (unlisted, "disagree: model.norm.weight is only in")]
    ):
        folder = tmp_path / str(number)
        ModelFolder(written["llama"].config, parts, {"weight_map": weight_map}).write(folder)
        with pytest.raises(ValueError, match=message):
            open_weights(folder, read_config(folder))


@pytest.mark.parametrize("place", [0, -1])
def test_a_tied_head_stored_otherwise_is_refused_and_its_cure_computes_what_transformers_does(
    place: int, written: dict[str, ModelFolder], tmp_path: Path
) -> None:
    folder = written["qwen2-tied"].copy()
    folder.files[SINGLE]["lm_head.weight"] = head = folder.files[SINGLE][EMBEDDING].clone()
    opened(folder, tmp_path)
    head[place, place] += 5.0
    folder.write(tmp_path / "other")
    with pytest.raises(ValueError, match="lm_head.weight and model.embed_tokens.weight differ; set it to false"):
        open_weights(tmp_path / "other", read_config(tmp_path / "other"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "other").eval()
    (tmp_path / "other" / "config.json").write_text(json.dumps(folder.config | {"tie_word_embeddings": False}))
    (row,) = rows = random_rows([12], VOCABULARY)
    with torch.no_grad():
        (mine,) = packed_logits(load_decoder(tmp_path / "other"), rows)
        assert (theirs(row[None]).logits[0] - mine).abs().max() < 1e-4
