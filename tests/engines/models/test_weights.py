from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from spmdrl.engines.models.hf.model_folder import hf_config_dict, read_config
from spmdrl.engines.models.hf.model_weights import WeightFiles, write_weights
from spmdrl.engines.models.make_model import RandomWeights, decoder_config
from spmdrl.nouns.batch import WeightSlice, whole_slice
from spmdrl.nouns.settings.model_config import MakeConfig
from tests.engines.models.support import load_decoder, packed_logits, random_rows

MAKE = MakeConfig(hidden_size=32, num_hidden_layers=2, intermediate_size=48, chars="0123456789+=")
CONFIG = decoder_config(MAKE)


def write_model(folder: Path, max_shard_bytes: int, *, seed: int = 0) -> None:
    weights = RandomWeights(CONFIG, seed)
    (folder / "config.json").write_text(json.dumps(hf_config_dict(CONFIG, torch.float32)))
    write_weights(folder, ((name, weights(name)) for name in weights.names), max_shard_bytes)


@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000], ids=["one file", "sharded"])
def test_what_we_write_has_parity_in_transformers(max_shard_bytes: int, tmp_path: Path) -> None:
    write_model(tmp_path, max_shard_bytes)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_bytes == 20_000)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    rows = random_rows([6, 11], CONFIG.vocab_size)
    for row, logits in zip(rows, packed_logits(load_decoder(tmp_path), rows), strict=True):
        assert (theirs(row[None]).logits[0] - logits).abs().max() < 1e-4


@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
def test_what_transformers_writes_has_bitwise_parity_here(max_shard_size: str, tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    theirs = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_key_value_heads=2), dtype=torch.float32)
    theirs.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    files = WeightFiles(tmp_path)
    expected = dict(theirs.named_parameters())
    assert files.names == sorted(expected)
    for name, weight in expected.items():
        assert files.shape(name) == tuple(weight.shape)
        assert torch.equal(files.read(whole_slice(name, files.shape(name))), weight)
    assert read_config(tmp_path).head_size == 8


def test_a_round_trip_keeps_every_bit_and_dtype_whatever_the_storage(tmp_path: Path) -> None:
    bucket = torch.randn(8, 6)
    weights = {"a": bucket[:3], "b": bucket[3:].T, "c": torch.randn(5).to(torch.bfloat16), "d": bucket[:, 1:4]}
    write_weights(tmp_path, weights.items(), max_shard_bytes=100)
    files = WeightFiles(tmp_path)
    for name, weight in weights.items():
        read = files.read(whole_slice(name, tuple(weight.shape)))
        assert read.dtype is weight.dtype and torch.equal(read, weight)


def test_a_buffer_may_be_reused_between_two_weights(tmp_path: Path) -> None:
    buffer = torch.empty(4)
    write_weights(tmp_path, ((f"w{value}", buffer.fill_(value)) for value in range(3)))
    files = WeightFiles(tmp_path)
    assert [files.read(whole_slice(name, (4,)))[0].item() for name in files.names] == [0.0, 1.0, 2.0]


def test_weights_are_never_written_beside_others(tmp_path: Path) -> None:
    write_weights(tmp_path, [("a", torch.ones(2))])
    with pytest.raises(ValueError, match="already holds weights .model.safetensors."):
        write_weights(tmp_path, [("a", torch.zeros(2))], max_shard_bytes=1)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[WeightFiles, torch.Tensor]:
    folder = tmp_path_factory.mktemp("stored")
    weight = torch.arange(35.0).reshape(5, 7)
    write_weights(folder, [("w", weight)])
    return WeightFiles(folder), weight


@given(st.tuples(st.integers(0, 5), st.integers(0, 5)), st.tuples(st.integers(0, 7), st.integers(0, 7)))
def test_any_box_of_a_weight_can_be_read(
    stored: tuple[WeightFiles, torch.Tensor], rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    files, weight = stored
    starts, stops = (min(rows), min(columns)), (max(rows), max(columns))
    expected = weight[starts[0] : stops[0], starts[1] : stops[1]]
    assert torch.equal(files.read(WeightSlice("w", starts, stops)), expected)


def test_missing_or_misshaped_weights_are_named(stored: tuple[WeightFiles, torch.Tensor], tmp_path: Path) -> None:
    files, _ = stored
    with pytest.raises(ValueError, match="holds no weight w2; the nearest name there is w;"):
        files.read(whole_slice("w2", (5, 7)))
    for wrong in ((6, 7), (5,)):
        with pytest.raises(ValueError, match=r"w in .* has shape \(5, 7\), but elements"):
            files.read(whole_slice("w", wrong))
    with pytest.raises(ValueError, match="neither model.safetensors nor"):
        WeightFiles(tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    write_weights(tmp_path, [("a", torch.ones(100))])
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="model.safetensors is not a whole safetensors file"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_not_finite_is_named_with_its_file(value: float, dtype: torch.dtype, tmp_path: Path) -> None:
    broken = torch.ones(4, 5, dtype=dtype)
    broken[2, 3] = value
    write_weights(tmp_path, [("a", torch.ones(2)), ("b", broken)])
    files = WeightFiles(tmp_path)
    files.read(whole_slice("a", (2,)))
    files.read(WeightSlice("b", (0, 0), (2, 5)))
    with pytest.raises(ValueError, match="model.safetensors: b holds NaN or infinity"):
        files.read(whole_slice("b", (4, 5)))


def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "outside.safetensors")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../outside.safetensors"}}')
    with pytest.raises(ValueError, match="only plain names of files beside it are read"):
        WeightFiles(inside)


def test_random_weights_depend_on_seed_and_name_only() -> None:
    first, again, other = RandomWeights(CONFIG, 1), RandomWeights(CONFIG, 1), RandomWeights(CONFIG, 2)
    name = "model.layers.0.mlp.up_proj.weight"
    again("model.embed_tokens.weight")
    assert torch.equal(first(name), again(name))
    assert not torch.equal(first(name), other(name))
    assert not torch.equal(first(name), first("model.layers.1.mlp.up_proj.weight"))
    box = WeightSlice(name, (3, 0), (9, 5))
    assert torch.equal(first.read(box), first(name)[3:9, :5])
    assert set(first("model.norm.weight").tolist()) == {1.0}


SPARSE = decoder_config(
    MakeConfig(model_type="qwen3_moe", hidden_size=32, num_hidden_layers=1, num_experts=5, moe_intermediate_size=3)
)
STACKED = "model.layers.0.mlp.experts.up_proj"


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> WeightFiles:
    folder = tmp_path_factory.mktemp("sparse")
    weights = RandomWeights(SPARSE, seed=0)
    write_weights(folder, ((name, weights(name)) for name in weights.names), max_shard_bytes=500)
    return WeightFiles(folder)


def test_stacked_experts_lie_one_by_one_in_files(sparse: WeightFiles) -> None:
    weights = RandomWeights(SPARSE, seed=0)
    assert sparse.names == weights.names
    assert sparse.shape(STACKED) == weights.shape(STACKED) == (5, 3, 32)
    assert torch.equal(sparse.read(whole_slice(STACKED, (5, 3, 32))), weights(STACKED))
    of_one = sparse.read(whole_slice("model.layers.0.mlp.experts.4.up_proj.weight", (3, 32)))
    assert torch.equal(of_one, weights(STACKED)[4])


@given(*(st.tuples(st.integers(0, size), st.integers(0, size)) for size in (5, 3, 32)))
def test_any_box_of_stacked_experts_can_be_read_and_made(
    sparse: WeightFiles, experts: tuple[int, int], rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    weights = RandomWeights(SPARSE, seed=0)
    bounds = [sorted(pair) for pair in (experts, rows, columns)]
    wanted = WeightSlice(STACKED, tuple(start for start, _ in bounds), tuple(stop for _, stop in bounds))
    expected = weights(STACKED)[tuple(slice(*pair) for pair in bounds)]
    for source in (sparse, weights):
        read = source.read(wanted)
        assert read.shape == expected.shape and torch.equal(read, expected)


def test_a_box_beyond_the_experts_and_a_left_out_expert_are_named(sparse: WeightFiles, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"experts.up_proj in .* has shape \(5, 3, 32\), but elements"):
        sparse.read(whole_slice(STACKED, (6, 3, 32)))
    prefix = "model.layers.0.mlp.experts"
    write_weights(tmp_path, [(f"{prefix}.{expert}.up_proj.weight", torch.ones(2)) for expert in (0, 2)])
    with pytest.raises(ValueError, match="experts.1.up_proj.weight is missing beside 2 other experts"):
        WeightFiles(tmp_path)
