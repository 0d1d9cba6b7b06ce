"""Pairs in data rows: as texts, as messages, as whole conversations."""

from __future__ import annotations

import json

import pytest

from spmdrl.dataflow.data.data_rows import RowNeeds, read_rows
from spmdrl.dataflow.data.records import BadRows
from spmdrl.nouns.settings.data_config import DataConfig

QUESTION, BETTER, WORSE = (
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "assistant", "content": "3"},
)


def read(tmp_path, *rows, margin_key=None):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    [source] = read_rows(str(path), DataConfig(), needs=RowNeeds(pair=True, margin_key=margin_key))
    return source


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "1+1=", "chosen": "2", "rejected": "3"}, "1+1="),
        ({"question": "1+1=", "chosen": [BETTER], "rejected": "3"}, "1+1="),
        ({"prompt": [QUESTION], "chosen": [BETTER], "rejected": [WORSE]}, [QUESTION]),
        ({"chosen": [QUESTION, BETTER], "rejected": [QUESTION, WORSE]}, [QUESTION]),
        # As UltraFeedback has them: the text of the prompt beside conversations.
        ({"prompt": "1+1=", "chosen": [QUESTION, BETTER], "rejected": [QUESTION, WORSE]}, [QUESTION]),
    ],
)
def test_pairs_are_read_in_every_form(tmp_path, row, prompt):
    [found] = read(tmp_path, row).rows
    assert (found.prompt, found.completion, found.rejected) == (prompt, "2", "3")


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"prompt": "1+1=", "chosen": "2"}, "no_pair"),
        ({"chosen": "2", "rejected": "3"}, "no_prompt"),
        ({"prompt": "1+1=", "chosen": "2", "rejected": " "}, "empty_response"),
        ({"prompt": "1+1=", "chosen": "2", "rejected": "2"}, "equal_pair"),
        ({"chosen": "yes, it is", "rejected": "no"}, "no_prompt"),
        ({"chosen": "1+1=\n\nAssistant: 2", "rejected": "1+1=\n\nAssistant: 2"}, "equal_pair"),
        ({"chosen": "1+1=\n\nAssistant: 2", "rejected": "1+1=\n\nAssistant:"}, "empty_response"),
        ({"prompt": "1+1=", "chosen": 2, "rejected": "3"}, "pair_type"),
        ({"prompt": "1+1=", "chosen": [QUESTION], "rejected": [WORSE]}, "pair_type"),
        ({"chosen": [QUESTION, BETTER], "rejected": [{**QUESTION, "content": "1+2="}, WORSE]}, "other_prompt"),
        ({"prompt": "1+1=", "chosen": [QUESTION, BETTER], "rejected": [WORSE]}, "other_prompt"),
    ],
)
def test_a_row_without_a_pair_is_a_bad_one(tmp_path, row, kind):
    with pytest.raises(BadRows) as refused:
        read(tmp_path, row)
    assert [bad.kind for bad in refused.value.rows] == [kind]


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("\n\nHuman: 1+1=\n\nAssistant: Hm\n\nAssistant: 2", "\n\nHuman: 1+1=\n\nAssistant: Hm\n\nAssistant: 3",
         "\n\nHuman: 1+1=\n\nAssistant: Hm\n\nAssistant:"),
        ("It is two", "It is three", "It is"),
        ("It is two", "It is two or three", "It is"),
    ],
)  # fmt: skip
def test_texts_without_a_prompt_share_their_beginning(tmp_path, chosen, rejected, prompt):
    [found] = read(tmp_path, {"chosen": chosen, "rejected": rejected}).rows
    assert found.prompt == prompt
    assert (prompt + found.completion, prompt + found.rejected) == (chosen, rejected)


def test_a_prompt_that_is_named_is_not_made_of_the_responses(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"chosen": "It is two", "rejected": "It is three"}))
    with pytest.raises(BadRows, match="no prompt in q"):
        read_rows(str(path), DataConfig(prompt_key="q"), needs=RowNeeds(pair=True))


def test_responses_keep_their_tool_calls(tmp_path):
    call = {**BETTER, "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    plain = {**WORSE, "tool_calls": None}
    [found] = read(tmp_path, {"chosen": [QUESTION, call], "rejected": [QUESTION, plain]}).rows
    assert (found.completion, found.rejected) == (call, "3")


def test_a_margin_is_a_number(tmp_path):
    pair = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    read(tmp_path, pair | {"margin": 0.5}, pair | {"margin": "2"}, margin_key="margin")
    for wrong in ({}, {"margin": "far"}, {"margin": True}, {"margin": None}):
        with pytest.raises(BadRows, match="no_margin"):
            read(tmp_path, pair | wrong, margin_key="margin")
    assert "chosen" in read(tmp_path, pair).summary and "rejected" in read(tmp_path, pair).summary
