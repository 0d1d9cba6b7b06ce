"""Rows that training on data alone can't learn are bad rows, for every verb that learns so."""

from __future__ import annotations

import pytest

from spmdrl.dataflow.data.data_rows import Row, SourceRows
from spmdrl.dataflow.data.prompts import LearntRows, Prompt, PromptSource
from spmdrl.dataflow.data.records import BadRows
from spmdrl.engines.models.renderer import Renderer
from spmdrl.nouns.settings.data_config import DataConfig, DataSource, TemplateOptions
from tests.support.letters import LetterTokenizer

POSITIONS = 400


def learnt_of(use: str = "auto", turns: str = "last", top: int = 200) -> LearntRows:
    tokenizer = LetterTokenizer()
    tokenizer.highest_id = top
    return LearntRows(Renderer(tokenizer, TemplateOptions(use)), turns)


def prompts_of(learnt: LearntRows, *rows: Row, on_bad_row: str = "error") -> PromptSource:
    source = SourceRows(DataSource("a", None), rows, (), {})
    config = DataConfig(on_bad_row=on_bad_row)
    check = learnt.check(vocab_size=200, max_positions=POSITIONS, rule=" (a rule)")
    return PromptSource([source], learnt.renderer, config, 0, vocab_size=1 << 20, check=check)


def row_of(number: int, answer: object, rejected: object = None, prompt: object = "1+1=") -> Row:
    return Row(str(number), f"a:{number}", prompt, None, {}, answer, rejected)


@pytest.mark.parametrize("size", [POSITIONS - 6, POSITIONS - 5, POSITIONS])
@pytest.mark.parametrize("rejected", [None, "3"])
def test_a_row_beyond_the_models_positions_is_refused_or_left_out(size, rejected):
    # A token begins the prompt's four letters, and one ends the answer.
    rows = [row_of(1, "2", rejected), row_of(2, "2" * size, rejected), row_of(3, "4", rejected)]
    learnt, is_whole = learnt_of(), size + 6 <= POSITIONS
    if not is_whole:
        with pytest.raises(
            BadRows, match=f"a:2: it has {size + 6} tokens, but the model has {POSITIONS} positions .a rule."
        ):
            prompts_of(learnt, *rows)
    kept = prompts_of(learnt, *rows, on_bad_row="skip")
    assert (len(kept), [bad.place for bad in kept.skipped]) == ((3, []) if is_whole else (2, ["a:2"]))


@pytest.mark.parametrize("place", [1, 2])
def test_an_answer_with_a_token_that_has_no_embedding_is_named(place):
    rows = [row_of(number, "ÿ" if number == place else "2") for number in (1, 2)]
    with pytest.raises(BadRows, match=f"a:{place}: its answer can't be learnt: it has token 255"):
        prompts_of(learnt_of(top=1 << 10), *rows)


def test_the_last_answer_or_every_one_is_learnt():
    messages = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    prompt = Prompt("1", (), "", None, {}, messages, "d")
    (last,) = learnt_of().of(prompt)
    assert "".join(map(chr, last.ids[last.is_learnt.index(True) : -1])) == "d" and last.ids[-1] == 0
    (every,) = learnt_of(turns="all").of(prompt)
    assert "".join(chr(one) for one, mark in zip(every.ids, every.is_learnt, strict=True) if mark) == "bd"


def test_of_every_turn_a_completion_goes_on_with_the_answer_that_the_prompt_begins():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for turns, expected in (("last", "c"), ("all", "bc")):
        (row,) = learnt_of(turns=turns).of(Prompt("1", (), "", None, {}, messages, "c"))
        text = "".join(chr(one) for one, mark in zip(row.ids, row.is_learnt, strict=True) if mark)
        assert text.removesuffix("\0") == expected and "".join(map(chr, row.ids)).count("<assistant>") == 1


def test_a_row_that_cannot_be_rendered_while_training_is_named():
    answer = {"role": "assistant", "content": None, "tool_calls": [{}]}
    with pytest.raises(ValueError, match="row 7 can't be learnt: a message has tool_calls"):
        learnt_of("never").of(Prompt("7", (), "", None, {}, [{"role": "user", "content": "a"}], answer))
