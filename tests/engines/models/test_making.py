from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spmdrl.engines.models.hf.model_folder import parameter_shapes, read_config
from spmdrl.engines.models.make_model import decoder_config, make_char_tokenizer, make_model_folder
from spmdrl.nouns.settings.model_config import PRINTABLE_CHARS, MakeConfig
from tests.engines.models.support import load_decoder, packed_logits, random_rows

TINY = MakeConfig(hidden_size=32, num_hidden_layers=1, intermediate_size=48)


@pytest.mark.parametrize(
    "sizes",
    [
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": False},
        {"model_type": "qwen3_moe", "num_experts": 4, "first_k_dense_replace": 1},
        {"model_type": "deepseek_v3"},
        {"model_type": "glm4_moe"},
        {"model_type": "gpt_oss", "sliding_window": 3},
        {"model_type": "gemma3_text", "sliding_window": 3},
        {"model_type": "gemma3_text", "num_hidden_layers": 1},
        {"model_type": "gemma4_text", "sliding_window": 3},
        {"model_type": "qwen3_5_text"},
        {"model_type": "qwen3_5_moe_text"},
        {"model_type": "qwen3_next", "first_k_dense_replace": 1},
    ],
    ids=lambda sizes: "-".join(map(str, sizes.values())),
)
def test_a_made_model_has_parity_in_transformers(sizes: dict[str, object], tmp_path: Path) -> None:
    make = MakeConfig(**{"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, **sizes})  # type: ignore
    make_model_folder(tmp_path / "model", make, seed=3)
    assert read_config(tmp_path / "model") == decoder_config(make)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    rows = random_rows([4, 7], vocab_size=100)
    for row, logits in zip(rows, packed_logits(load_decoder(tmp_path / "model"), rows), strict=True):
        assert (theirs(row[None]).logits[0] - logits).abs().max() < 1e-4
    assert theirs.config.eos_token_id == theirs.generation_config.eos_token_id == 2
    assert theirs.dtype is torch.float32


def test_a_made_tokenizer_gives_one_token_a_character_and_back(tmp_path: Path) -> None:
    make_char_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(PRINTABLE_CHARS).input_ids
    assert ids == list(range(4, 4 + len(PRINTABLE_CHARS)))
    assert tokenizer.decode(ids) == PRINTABLE_CHARS
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer("1é2").input_ids == [*tokenizer("1").input_ids, 3, *tokenizer("2").input_ids]
    assert tokenizer.decode([1, *tokenizer("a b").input_ids, 2], skip_special_tokens=True) == "a b"


def test_the_same_seed_makes_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        make_model_folder(tmp_path / name, TINY, seed)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(files) == 5
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "three")]
    assert weights[0] != weights[1]


def test_a_folder_appears_only_when_complete_and_is_never_overwritten(tmp_path: Path) -> None:
    leftover = tmp_path / ".model.partial"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"cut short")
    make_model_folder(tmp_path / "model", TINY, seed=0)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    with pytest.raises(ValueError, match="already holds files"):
        make_model_folder(tmp_path / "model", TINY, seed=0)


def test_the_default_sizes_give_under_a_million_parameters(tmp_path: Path) -> None:
    make_model_folder(tmp_path / "model", MakeConfig(), seed=0)
    config = read_config(tmp_path / "model")
    assert config == decoder_config(MakeConfig())
    assert 700_000 < sum(torch.Size(shape).numel() for shape in parameter_shapes(config).values()) < 1_000_000


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 100, "num_attention_heads": 8}, "model.make.hidden_size 100 must be a multiple of .* = 16"),
        (
            {"num_key_value_heads": 3},
            "model.make.num_attention_heads 4 must be a multiple of model.make.num_key_value_heads 3",
        ),
        ({"sliding_window": 4}, "model.make.sliding_window is 4, but a qwen3 made here has no windows"),
        (
            {"model_type": "gpt_oss", "first_k_dense_replace": 1},
            "model.make.first_k_dense_replace is 1, but all layers of a gpt_oss are sparse",
        ),
        ({"num_experts": 4}, "model.make.num_experts is 4, but a qwen3 has no such size; .* to qwen3_moe"),
        (
            {"model_type": "qwen3_moe", "num_experts_per_tok": 9},
            "model.make .* num_experts_per_tok is 9, .* 1 and the 8",
        ),
        (
            {"model_type": "deepseek_v3", "first_k_dense_replace": 4},
            "first_k_dense_replace 4 leaves none of model.make.num_hidden_layers 4",
        ),
        ({"chars": "abca"}, "repeats .'a'."),
        ({"chars": ""}, "or is empty"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_key(sizes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MakeConfig(**sizes)  # type: ignore[arg-type]


def test_the_package_starts_without_transformers_or_tokenizers() -> None:
    script = (
        "import sys, spmdrl.engines.models.kernels.packed, spmdrl.engines.models.make_model\n"
        "print([name for name in ('transformers', 'tokenizers', 'huggingface_hub') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
