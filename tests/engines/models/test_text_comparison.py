"""Text becomes tokens and text again as with transformers itself, over tokenizers and templates of every kind."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import random
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from spmdrl.engines.models.hf.foreign_folder import try_folder
from spmdrl.engines.models.renderer import Renderer
from spmdrl.engines.models.tokenizer import ModelTokenizer
from spmdrl.nouns.settings.data_config import TemplateOptions
from tests.support.tokenizer_zoo import ZOO, Specimen, table

pytestmark = pytest.mark.oldest

NUM_CONVERSATIONS = int(os.environ.get("SPMDRL_FUZZ", "3000"))
_BY_NAME = {specimen.name: specimen for specimen in ZOO}
_PIECES = (
    "What is 12 + 30?", "The answer is 42.", " ", "  ", "\n", "\n\n", "\t", "é", "中文", "😀", "e\u0301", "\u200d",
    "x" * 40,
    "it 's", "n't !", "<answer>", "</answer>", "<think>", "</think>", "<b>", "{{ x }}", "{% if %}", "[INST", "|>", "▁",
    '{"a": 1}', "\\n", "0", "helpful", "HELPFUL", "assistant", "user\n", "\u3000", "\xa0", "½ﬁ", "שלום",
)  # fmt: skip
_TOOL = {"type": "function", "function": {"name": "add", "description": "Add é.", "parameters": {"type": "object"}}}
_CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "中"}}}


@functools.cache
def _renderer(name: str, use: str = "auto") -> Renderer:
    with TemporaryDirectory() as folder:
        # All is in memory once it is loaded.
        return Renderer(ModelTokenizer(_BY_NAME[name].make(Path(folder))), TemplateOptions(use=use))  # type: ignore[arg-type]


def _text(rng: random.Random) -> str:
    if rng.random() < 0.02:
        return "".join(rng.choices(_PIECES, k=400))
    return rng.choice(["", " ", "\n"] + ["".join(rng.choices(_PIECES, k=rng.randint(1, 8))) for _ in range(9)])


def _conversation(rng: random.Random) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages that end before an answer, and the row's columns."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": _text(rng)}] if rng.random() < 0.3 else []
    columns: dict[str, Any] = {}
    if rng.random() < 0.2:
        columns["tools"] = [_TOOL] * rng.randint(1, 3)
    if rng.random() < 0.1:
        columns["chat_template_kwargs"] = {"enable_thinking": rng.random() < 0.5}
    for number in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": _text(rng)})
        if number and rng.random() < 0.1:
            messages.append({"role": "user", "content": _text(rng)})
        if rng.random() < 0.6:
            answer: dict[str, Any] = {"role": "assistant", "content": _text(rng)}
            if rng.random() < 0.2:
                answer["reasoning_content"] = _text(rng)
            messages.append(answer)
            if "tools" in columns and rng.random() < 0.7:
                answer["tool_calls"] = [_CALL]
                messages.append({"role": "tool", "content": _text(rng)})
    if messages[-1]["role"] == "assistant":
        messages.append({"role": "user", "content": _text(rng)})
    return messages, columns


def _of_transformers(
    renderer: Renderer, messages: list[dict[str, Any]], columns: Mapping[str, Any], **how: Any
) -> list[int] | None:
    """What transformers makes of it; None where the template refuses it."""
    options = {"tokenize": True, "return_dict": True, **how, **columns.get("chat_template_kwargs", {})}
    try:
        return renderer.tokenizer.raw.apply_chat_template(messages, tools=columns.get("tools"), **options)["input_ids"]
    except Exception:
        return None


def _compare(name: str, seed: int) -> bool:
    """Compare one random prompt and its answer; returns False where the template has no such text."""
    renderer, rng = _renderer(name), random.Random(seed)
    messages, columns = _conversation(rng)
    case = f"{name}, seed {seed}: {messages}"
    expected = _of_transformers(renderer, messages, columns, add_generation_prompt=True)
    rendered = renderer.prompts([messages], [columns])
    assert (0 in rendered.problems) == (expected is None), f"{case}: {rendered.problems}"
    if expected is None:
        return False
    prompt = list(rendered.prompt_ids(0))
    assert prompt == expected, case
    bos = renderer.tokenizer.raw.bos_token_id
    if bos is not None and _BY_NAME[name].around:
        assert prompt[:2].count(bos) <= 1, case
    answer: dict[str, Any] = {"role": "assistant", "content": _text(rng)}
    if "tools" in columns and rng.random() < 0.3:
        answer["tool_calls"] = [_CALL]
    whole = _of_transformers(renderer, [*messages, answer], columns)
    if whole is None or whole[: len(prompt)] != prompt:
        # The template writes a prompt otherwise once it is answered: no tokens of its own to compare with.
        return False
    given = answer if "tool_calls" in answer else answer["content"]
    marked = renderer.answer(messages, given, columns)
    stops = renderer.tokenizer.stop_token_ids
    end = next((place for place in range(len(prompt), len(whole)) if whole[place] in stops), None)
    ids = marked.ids if end is not None else marked.ids[:-1]
    assert ids == whole[: len(ids)], f"{case}, {answer!r}: {ids} isn't the beginning of {whole}"
    assert marked.is_learnt == [False] * len(prompt) + [True] * (len(marked.ids) - len(prompt)), case
    assert marked.ids[-1] in stops, case
    if end is not None:
        assert len(ids) == end + 1, f"{case}, {answer!r}"
    return True


def _compare_all(number: int) -> None:
    compared = [_compare(ZOO[seed % len(ZOO)].name, seed) for seed in range(number)]
    assert sum(compared) > 0.9 * number


def test_500_random_conversations_have_transformers_own_tokens() -> None:
    _compare_all(500)


@pytest.mark.slow
def test_thousands_of_random_conversations_have_transformers_own_tokens() -> None:
    _compare_all(NUM_CONVERSATIONS)


@pytest.mark.parametrize("specimen", ZOO, ids=lambda specimen: specimen.name)
def test_plain_text_begins_as_the_tokenizer_begins_it_and_never_ends(specimen: Specimen) -> None:
    renderer = _renderer(specimen.name, "never")
    raw, text = renderer.tokenizer.raw, "What is 12 + 30?"
    ids = list(renderer.prompts([text]).prompt_ids(0))
    own = raw(text)["input_ids"]
    is_ended = own[-1] in renderer.tokenizer.stop_token_ids
    assert ids == (own[:-1] if is_ended else own)
    if ids[0] == raw.bos_token_id:
        assert list(renderer.prompts([raw.bos_token + text]).prompt_ids(0)).count(ids[0]) == 1


def test_every_template_of_the_zoo_passes_its_trial(tmp_path: Path) -> None:
    folder = _BY_NAME["llama2"].make(tmp_path)
    named = [{"name": specimen.name, "template": specimen.template} for specimen in ZOO]
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": named}))
    try_folder(folder, seconds=60)


def test_a_row_that_becomes_far_longer_than_it_was_is_named_with_the_template(tmp_path: Path) -> None:
    template = "{{ messages[0].content * (90000 if 'bomb' in messages[0].content else 1) }}"
    folder = dataclasses.replace(_BY_NAME["qwen"], template=template).make(tmp_path)
    rows = [[{"role": "user", "content": text}] for text in ("a sound row", "a bomb")]
    problems = Renderer(ModelTokenizer(folder)).prompts(rows).problems
    assert list(problems) == [1]
    assert str(folder / "chat_template.jinja") in problems[1] and "renders 540000 characters" in problems[1]


def test_the_documentation_has_the_table_of_the_zoo() -> None:
    assert table() in (Path(__file__).parents[3] / "docs" / "text.md").read_text(encoding="utf-8")
