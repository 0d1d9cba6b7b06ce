"""Which tokens end a response."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmdrl.engines.models.tokenizer import ModelTokenizer, stop_token_ids
from tests.support.text_models import byte_level_folder

pytestmark = pytest.mark.oldest


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


@pytest.mark.parametrize(("name", "content"), [("tokenizer.json", '{"model": {}}'), ("tokenizer_config.json", "{")])
def test_a_tokenizer_that_cannot_be_loaded_is_named_with_its_folder(name: str, content: str, tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)
    (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=f"the tokenizer of {folder} can't be loaded"):
        ModelTokenizer(folder)
