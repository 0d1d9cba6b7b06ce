"""Which tokens end a response."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmdrl.engines.models.tokenizer import stop_token_ids

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
