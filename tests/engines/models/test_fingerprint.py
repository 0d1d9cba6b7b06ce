from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spmdrl.engines.models.hf.fingerprint import architecture, architecture_differences, fingerprint
from spmdrl.engines.models.hf.model_weights import write_weights
from spmdrl.engines.models.make_model import decoder_config, make_model_folder
from spmdrl.nouns.settings.model_config import MakeConfig

MAKE = MakeConfig(hidden_size=32, num_hidden_layers=2, intermediate_size=48, chars="0123456789+=")
SPARSE = MakeConfig(model_type="deepseek_v3", hidden_size=32, num_hidden_layers=2, chars="01")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_model_folder(tmp_path / "model", MAKE, seed=0)
    return tmp_path / "model"


def test_a_copy_of_a_folder_has_the_same_fingerprint(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    assert fingerprint(model) == fingerprint(tmp_path / "copy")


def test_another_seed_has_other_weights_and_the_same_architecture(model: Path, tmp_path: Path) -> None:
    make_model_folder(tmp_path / "other", MAKE, seed=1)
    one, other = fingerprint(model), fingerprint(tmp_path / "other")
    assert one.architecture == other.architecture and one.tokenizer == other.tokenizer
    assert one.weights != other.weights


def test_another_chat_template_changes_the_tokenizer_only(model: Path) -> None:
    before = fingerprint(model)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    after = fingerprint(model)
    assert (before.architecture, before.weights) == (after.architecture, after.weights)
    assert before.tokenizer != after.tokenizer


@pytest.mark.parametrize("make", [MAKE, SPARSE], ids=["dense", "sparse"])
def test_an_architecture_survives_a_json_file(make: MakeConfig) -> None:
    found = architecture(decoder_config(make))
    assert json.loads(json.dumps(found)) == found


def test_differing_keys_of_two_architectures_are_named() -> None:
    config = decoder_config(MAKE)
    narrow = architecture(replace(config, hidden_size=16, num_layers=1))
    assert architecture_differences(architecture(config), architecture(config)) == []
    assert architecture_differences(narrow, architecture(config)) == [
        "hidden_size is 16, not 32",
        "num_layers is 1, not 2",
    ]
    differences = architecture_differences(architecture(config), architecture(decoder_config(SPARSE)))
    assert "moe.num_experts is None, not 8" in differences


def test_large_files_are_sampled_from_end_to_end(model: Path) -> None:
    digests = []
    for place in (None, 0, -1):
        (model / "model.safetensors").unlink()
        values = torch.zeros(4 * 1024 * 1024)
        if place is not None:
            values[place] = 1.0
        write_weights(model, [("large", values)])
        digests.append(fingerprint(model).weights)
    assert len(set(digests)) == 3


def test_damaged_weights_are_named(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="model.safetensors is not a whole safetensors file"):
        fingerprint(model)
    path.unlink()
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "a.safetensors"}}')
    with pytest.raises(ValueError, match="lacks a.safetensors of 1 files"):
        fingerprint(model)
    (model / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(ValueError, match="names no weight"):
        fingerprint(model)
