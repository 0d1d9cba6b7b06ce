"""Which tokens end a response, and what the chat template ends answers with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from spmdrl.engines.models.making.make_model import make_char_tokenizer
from spmdrl.engines.models.tokenizer import ModelTokenizer, stop_token_ids

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A char tokenizer with <eos> as its end token and ChatML's two tokens beside it."""
    make_char_tokenizer(tmp_path)
    tokens = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokens.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokens.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def tokenizer_with(folder: Path, template: str | None = None, **generation: Any) -> ModelTokenizer:
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelTokenizer(folder)


def test_an_end_of_turn_that_stops_nothing_is_named_with_the_way_out(folder: Path) -> None:
    tokenizer = tokenizer_with(folder, CHATML)
    end = tokenizer.raw.convert_tokens_to_ids("<|im_end|>")
    warning = tokenizer.end_of_turn_warning()
    assert warning is not None and "\n" not in warning
    assert f"ends answers with '<|im_end|>' ({end}), but responses stop at '<eos>' (2) only" in warning
    assert f'set "eos_token_id": [2, {end}] in {folder / "generation_config.json"}' in warning
    cured = tokenizer_with(folder, eos_token_id=[2, end])
    assert cured.end_of_turn_warning() is None
    assert [str(stop) for stop in cured.stop_tokens] == ["'<eos>' (2)", f"'<|im_end|>' ({end})"]


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{% for m in messages %}{{ m.content }}<eos>{% endfor %}",
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
        "{{ raise_exception('a system message must come first') }}",
        "{{ messages[0",
    ],
    ids=["none", "end token", "no special token", "no answers", "raises", "broken"],
)
def test_templates_without_another_end_of_turn_bring_no_warning(template: str | None, folder: Path) -> None:
    assert tokenizer_with(folder, template).end_of_turn_warning() is None


def test_end_tokens_of_config_json_count_where_generation_config_names_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert stop_token_ids(tmp_path, 2) == (2, 7)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert stop_token_ids(tmp_path, 2) == (2, 7)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 2]}')
    assert stop_token_ids(tmp_path, 2) == (2, 3)


@pytest.mark.parametrize("given", ['"2"', "true", "[2, -1]", "[[2]]", "2.0"])
def test_end_tokens_that_are_no_ids_are_refused(given: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {given}}}')
    with pytest.raises(ValueError, match="eos_token_id is .* but must be a token id or a list of them"):
        stop_token_ids(tmp_path, None)


def test_a_folder_without_an_end_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="names no end token"):
        stop_token_ids(tmp_path, None)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match="generation_config.json is not JSON"):
        stop_token_ids(tmp_path, None)
