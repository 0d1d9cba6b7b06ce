"""Tokens as text: as it was written, with its special tokens; what others wrote as tokens; padding that is free."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from spmdrl.engines.generation.protocol import completes_stop_string
from spmdrl.engines.models.renderer import Renderer, TemplateOptions
from spmdrl.engines.models.tokenizer import ModelTokenizer, pad_apart
from tests.support.tokenizer_folders import CHATML, CHATML_TOKENS, byte_level, sentence_piece, word_piece

pytestmark = pytest.mark.oldest

THINKING = (*CHATML_TOKENS[:2], "<think>", "</think>", CHATML_TOKENS[2])
TEXTS = (
    "a",
    " a",
    "=b",
    "\nx",
    "\n\n b",
    "中文。",
    "x != 3 , y 's",
    "we do n't . ?",
    "😀 👩‍👩‍👧",
    "  two  ",
    "<0x41>",
    "",
)
KINDS = {"byte level": byte_level, "SentencePiece": sentence_piece}


@pytest.fixture(params=KINDS)
def exact(request: pytest.FixtureRequest, tmp_path: Path) -> ModelTokenizer:
    """A tokenizer that loses nothing of a text, whose folder asks for spaces to be cleaned up."""
    return ModelTokenizer(KINDS[request.param](tmp_path, clean_up_tokenization_spaces=True))


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_behind_another_is_the_same_after_encoding_and_decoding(exact: ModelTokenizer, text: str) -> None:
    assert exact.decode(exact.encode_foreign(text)) == text


def test_a_response_is_what_stands_behind_its_prompt(exact: ModelTokenizer) -> None:
    whole = "What is 12 + 30 ? The answer is 42 , hello 中文 !"
    ids, numbers = exact.encode(whole), random.Random(0)
    for _ in range(20):
        cut = numbers.randrange(1, len(ids))
        prompt, response = exact.decode_all(ids[:cut]), exact.decode(ids[cut:])
        if "\ufffd" not in prompt + response:
            assert exact._text(ids[:cut]) + response == exact._text(ids)


def test_special_tokens_are_part_of_the_text_but_for_the_end_of_turn_and_padding(tmp_path: Path) -> None:
    folder = byte_level(tmp_path, THINKING)
    tokenizer = ModelTokenizer(folder)
    padding, _, think, answer, end = range(5)
    letter = tokenizer.encode("a")
    assert tokenizer.decode([think, *letter, answer, *letter, end]) == "<think>a</think>a"
    assert tokenizer.decode([padding, think, padding, *letter, end, end]) == "<think>a"
    assert tokenizer.decode([think, end, *letter]) == "<think>a", "an end of turn in the middle"
    assert tokenizer.decode([end]) == tokenizer.decode([]) == ""
    assert ModelTokenizer(folder, skips_special=True).decode([think, *letter, answer, *letter, end]) == "aa"
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": letter}))
    assert ModelTokenizer(folder).decode([think, *letter, end]) == "<think>a", "a stop token that is an ordinary one"


@pytest.mark.parametrize("kind", [*KINDS.values(), word_piece], ids=[*KINDS, "WordPiece"])
def test_what_others_wrote_holds_no_special_token(kind, tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(kind(tmp_path))
    marks = [token.content for token in tokenizer.raw.added_tokens_decoder.values()]
    ids = set(tokenizer.raw.added_tokens_decoder) - {tokenizer.raw.unk_token_id}
    numbers = random.Random(1)
    for _ in range(200):
        text = "".join(numbers.choice([*marks, *(mark[1:] for mark in marks), "a", " ", "\n"]) for _ in range(6))
        assert not ids & set(tokenizer.encode_foreign(text)), text
    before, after = tokenizer.encode_foreign("a", marks[-1], marks[-1])[:1], tokenizer.encode_foreign("", "", marks[-1])
    assert before == after == [tokenizer.raw.convert_tokens_to_ids(marks[-1])]


def test_tokens_that_the_template_writes_are_kept_out_and_other_added_words_stay(tmp_path: Path) -> None:
    added = ("<tool_call>", "hello world", "   ")
    folder = byte_level(tmp_path, added=added, template="{% for m in messages %}<tool_call>   {% endfor %}")
    tokenizer = ModelTokenizer(folder)
    call, word, spaces = (tokenizer.raw.convert_tokens_to_ids(text) for text in added)
    assert call not in tokenizer.encode_foreign("a<tool_call>b") and call in tokenizer.encode("a<tool_call>b")
    assert {word, spaces} <= set(tokenizer.encode_foreign("hello world   b"))


def test_tokens_that_only_the_file_of_a_template_writes_are_kept_out_too(tmp_path: Path) -> None:
    added = ("<tool_call>", "<result>")
    given = ModelTokenizer(byte_level(tmp_path, added=added, template="{% for m in messages %}<tool_call>{% endfor %}"))
    call, result = (given.raw.convert_tokens_to_ids(text) for text in added)
    assert result in given.encode_foreign("a<result>b")
    (tmp_path / "own.jinja").write_text("{% for m in messages %}<result>{{ m.content }}{% endfor %}")
    tokenizer = Renderer(given, TemplateOptions(file=str(tmp_path / "own.jinja"))).tokenizer
    assert result not in tokenizer.encode_foreign("a<result>b") and result in tokenizer.encode("a<result>b")
    assert call in tokenizer.encode_foreign("a<tool_call>b"), "what the file's template doesn't write is a word"
    assert result in given.encode_foreign("a<result>b"), "the tokenizer that was given stays"


def test_a_special_token_can_be_a_stop_string_and_padding_too(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(byte_level(tmp_path, THINKING))
    ids = [*tokenizer.encode("a b"), 1]
    assert completes_stop_string(ids, ["<|im_start|>"], tokenizer.decode_all)
    assert completes_stop_string([*ids[:-1], 0], ["b<|endoftext|>"], tokenizer.decode_all)
    assert not completes_stop_string(ids[:-1], ["<|im_start|>"], tokenizer.decode_all)


@pytest.mark.parametrize("stop", ["。", "句。", "👩‍👧", "é", " a", "a"])
def test_a_stop_string_is_found_at_its_last_token_whatever_stands_before(exact: ModelTokenizer, stop: str) -> None:
    for behind in range(40):
        text = ("b" * (behind % 5) + "中文é字👨😀"[: behind % 7] * 4 + "ü" * behind).replace(stop, "") + stop
        ids = exact.encode_foreign(text + "再来再来 x")
        ends = [end for end in range(1, len(ids) + 1) if completes_stop_string(ids[:end], [stop], exact.decode_all)]
        first = next(end for end in range(1, len(ids) + 1) if stop in exact.decode_all(ids[:end]))
        assert ends[0] == first, text


def test_ids_that_are_no_token_are_counted_inside_and_behind_the_vocabulary(tmp_path: Path) -> None:
    folder = byte_level(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    size = len(content["model"]["vocab"])
    content["model"]["merges"] = []
    content["model"]["vocab"] = {text: place for text, place in content["model"]["vocab"].items() if place != 100}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, size + 1]}))
    found = ModelTokenizer(folder).ids_without_token(size + 4)
    # What ends a response must be drawn, with a text or without.
    assert found == (100, size, size + 2, size + 3)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_classifier_learns_from_every_token_of_a_conversation(kind, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    plain, folder = (kind(tmp_path / name, template=CHATML) for name in ("plain", "saved"))
    for each in (plain, folder):
        (each / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    size = len(ModelTokenizer(plain).raw) + 4
    pad = pad_apart(folder, size)
    tokenizer = ModelTokenizer(folder)
    tokenizer.check_same_tokens(ModelTokenizer(plain))
    assert tokenizer.raw.pad_token_id == pad < size
    turns = [{"role": "user", "content": "What is 12 + 30 ?"}, {"role": "assistant", "content": "42 !"}]
    text = tokenizer.raw.apply_chat_template(turns, tokenize=False)
    ids = tokenizer.encode(text)
    assert ids == ModelTokenizer(plain).encode(text) and pad not in ids
    config = transformers.LlamaConfig(
        vocab_size=size, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_labels=1, pad_token_id=pad,
    )  # fmt: skip
    model = transformers.LlamaForSequenceClassification(config)
    model(torch.tensor([ids])).logits.sum().backward()
    gradient = model.get_input_embeddings().weight.grad.abs().sum(1)
    assert all(gradient[token] > 0 for token in ids)


def test_padding_that_the_folder_has_or_reserves_is_taken_first(tmp_path: Path) -> None:
    free = byte_level(tmp_path / "free", ("<pad>", "<|im_start|>", "<|im_end|>"), template=CHATML)
    assert pad_apart(free, 320) == 0
    reserved = byte_level(tmp_path / "reserved", (*CHATML_TOKENS[:2], "<r0>", "<fim_pad>", CHATML_TOKENS[2]))
    (reserved / "chat_template.jinja").write_text(CHATML)
    (reserved / "generation_config.json").write_text('{"eos_token_id": [0, 4]}')
    assert pad_apart(reserved, 320) == 3
