"""Shard files are read only where they hold all of a model, and of this one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from spmdrl.engines.models.make_model import RandomWeights
from spmdrl.engines.training.checkpoints.trainer_state import (
    ShardFiles,
    load_trainer_state,
    trainer_state,
    write_shards,
)
from spmdrl.engines.training.training_engine import TrainingEngine
from spmdrl.nouns.batch import WeightSlice
from spmdrl.nouns.settings.training_config import TrainingConfig
from spmdrl.resources.layout import UpdateLayout, fit_update_layout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World
from tests.engines.training.tiny import CONFIG, OPTIM, make_engine, whole_weights

FILE = "shards_00000.safetensors"
HEAD = "weight/lm_head.weight"


@pytest.fixture
def folder(world: World, tmp_path: Path) -> Path:
    write_shards(tmp_path, 0, trainer_state(make_engine(world)))
    return tmp_path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 16}, r"weight/model.embed_tokens.weight has shape \(17, 8\) there and \(16, 8\) here"),
        ({"vocab_size": 18}, r"weight/model.embed_tokens.weight has shape \(17, 8\) there and \(18, 8\) here"),
        (
            {"intermediate_size": 12},
            r"weight/model.layers.0.mlp.\w+_proj.weight has shape \(.*\) there and \(.*\) here",
        ),
        ({"num_layers": 1}, "11 weights differ, model.layers.1.input_layernorm.weight is only in the checkpoint"),
        ({"num_layers": 3}, "11 weights differ, model.layers.2.input_layernorm.weight is only in the model"),
        ({"qk_norm": False}, "4 weights differ, .*k_norm.weight is only in the checkpoint"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(
    change: dict[str, Any], message: str, world: World, folder: Path
) -> None:
    mesh = build_update_mesh(fit_update_layout(UpdateLayout(), world.size), world.device, world.rank)
    config = replace(CONFIG, **change)
    engine = TrainingEngine(config, TrainingConfig(), OPTIM, mesh, world.device)
    engine.load(RandomWeights(config, seed=1))
    before = {name: weight.clone() for name, weight in whole_weights(engine).items()}
    with pytest.raises(ValueError, match=f"is of another model: {message}"):
        load_trainer_state(engine, ShardFiles(folder))
    assert all(torch.equal(weight, before[name]) for name, weight in whole_weights(engine).items())


def rewritten(folder: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> None:
    """Change a file's index and tensors and write both again, so that the file itself is sound."""
    with safe_open(folder / FILE, framework="pt") as file:
        slices = json.loads(file.metadata()["slices"])
    tensors = load_file(folder / FILE)
    change(slices, tensors)
    save_file(tensors, folder / FILE, metadata={"slices": json.dumps(slices)})


def test_an_index_that_lies_about_a_tensor_is_refused(folder: Path) -> None:
    def stretch(slices: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors[HEAD] = tensors[HEAD][:1].clone()

    rewritten(folder, stretch)
    with pytest.raises(ValueError, match=rf"{FILE} is not a whole file .*{HEAD} has shape \(1, 8\), but its slice"):
        ShardFiles(folder)


@pytest.mark.parametrize("slices", ["null", "[3]", '{"weight/a": 3}', '{"weight/a": [[0], [1]]}', "{", "[" * 100_000])
def test_a_damaged_index_is_refused_in_one_line(slices: str, folder: Path) -> None:
    save_file(load_file(folder / FILE), folder / FILE, metadata={"slices": slices})
    with pytest.raises(ValueError, match=f"{FILE} is not a whole file of shards") as caught:
        ShardFiles(folder)
    assert "\n" not in str(caught.value)


def test_a_truncated_file_is_refused(folder: Path) -> None:
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-9])
    with pytest.raises(ValueError, match=f"{FILE} is not a whole file of shards"):
        ShardFiles(folder)


def test_shards_that_leave_a_part_out_or_hold_one_twice_are_refused(folder: Path) -> None:
    (folder / "shards_00001.safetensors").write_bytes((folder / FILE).read_bytes())
    with pytest.raises(ValueError, match=r"holds 272 elements of .*, whose shape \(17, 8\) has 136"):
        ShardFiles(folder)
    (folder / "shards_00001.safetensors").unlink()

    def cut(slices: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        slices[HEAD], tensors[HEAD] = [[1, 0], [17, 8]], tensors[HEAD][1:].clone()

    rewritten(folder, cut)
    with pytest.raises(ValueError, match="holds 128 elements of weight/lm_head.weight"):
        ShardFiles(folder)


def test_missing_kinds_are_named(world: World, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no shards_"):
        ShardFiles(tmp_path)
    state = trainer_state(make_engine(world))
    write_shards(tmp_path, 0, {key: shard for key, shard in state.items() if not key.startswith("exp_avg/")})
    with pytest.raises(ValueError, match="0 of the 136 elements of exp_avg/lm_head.weight"):
        ShardFiles(tmp_path).read("exp_avg", WeightSlice("lm_head.weight", (0, 0), (17, 8)))
