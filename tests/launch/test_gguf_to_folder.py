"""A GGUF file becomes a folder with the same model and tokenizer, which our decoder and transformers open."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engines.models.support import load_decoder, packed_logits, random_rows
from tests.support.jobs import ROOT
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer

from spmdrl.engines.models.hf.model_folder import read_config
from spmdrl.engines.models.hf.weight_check import open_weights
from spmdrl.nouns.batch import whole_slice

gguf = pytest.importorskip("gguf", reason="reading GGUF needs pip install -e '.[gguf]'")
pytest.importorskip("accelerate", reason="reading GGUF needs pip install -e '.[gguf]'")

WIDTH, FEED_FORWARD, HEADS, KV_HEADS, HEAD_SIZE, LAYERS = 64, 96, 2, 1, 32, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "ab"]
TEMPLATE = "{% for message in messages %}{{ '<|im_start|>' + message['content'] + '<|im_end|>' }}{% endfor %}"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers with a tied head and weights in Q4_1."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_SIZE)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    random = np.random.default_rng(0)
    kind = gguf.GGMLQuantizationType.Q4_1
    for name, rows, columns in _matrices():
        values = random.standard_normal((rows, columns), dtype=np.float32) / columns**0.5
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name in ("output_norm", *(f"blk.{layer}.{kind}_norm" for layer in range(LAYERS) for kind in ("attn", "ffn"))):
        writer.add_tensor(f"{name}.weight", 1 + random.standard_normal(WIDTH, dtype=np.float32) / 10)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _matrices() -> list[tuple[str, int, int]]:
    query, pair = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
    layer = [("attn_q", query, WIDTH), ("attn_k", pair, WIDTH), ("attn_v", pair, WIDTH), ("attn_output", WIDTH, query)]
    layer += [("ffn_gate", FEED_FORWARD, WIDTH), ("ffn_up", FEED_FORWARD, WIDTH), ("ffn_down", WIDTH, FEED_FORWARD)]
    named = [(f"blk.{number}.{name}.weight", *shape) for number in range(LAYERS) for name, *shape in layer]
    return [("token_embd.weight", len(TOKENS), WIDTH), *named]


@pytest.fixture(scope="module")
def folder(source: Path) -> Path:
    target = source.parent / "model"
    # What an interrupted call leaves behind is no part of the model.
    (target.with_name("model.part")).mkdir()
    (target.with_name("model.part") / "stale.txt").touch()
    command = [sys.executable, str(ROOT / "launch/gguf_to_folder.py"), str(source), str(target)]
    subprocess.run(command, check=True, timeout=120)
    return target


@pytest.mark.slow
def test_weights_are_those_that_the_file_holds(source: Path, folder: Path) -> None:
    files = open_weights(folder, read_config(folder))
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.1.ffn_down.weight": "model.layers.1.mlp.down_proj.weight",
    }
    held = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors if tensor.name in names}
    for name, tensor in held.items():
        expected = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(files.read(whole_slice(names[name], tuple(expected.shape))), expected)
    assert len(held) == 2 and not list(folder.parent.glob("*.part")) and not (folder / "stale.txt").exists()


def test_our_decoder_opens_the_folder_and_agrees_with_transformers(folder: Path) -> None:
    rows = random_rows([9, 1, 23], len(TOKENS))
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for row, logits in zip(rows, packed_logits(load_decoder(folder), rows), strict=True):
            expected = theirs(row[None]).logits[0].log_softmax(-1)
            torch.testing.assert_close(logits.log_softmax(-1), expected, rtol=1e-5, atol=1e-5)


def test_the_tokenizer_ends_answers_with_the_models_end_token(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "ab c"}], tokenize=False)
    assert tokenizer(text, add_special_tokens=False).input_ids[-1] == tokenizer.eos_token_id == 2
    assert tokenizer.decode(tokenizer("ab c", add_special_tokens=False).input_ids) == "ab c"
