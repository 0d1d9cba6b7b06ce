"""Which tokens of a conversation the assistant wrote, by the template's marks and by prefixes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from spmdrl.engines.models.conversation import marked_conversation
from spmdrl.engines.models.making.make_model import make_char_tokenizer
from spmdrl.engines.models.tokenizer import ModelTokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The same text, with the assistant's part marked.
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# As templates of reasoning models do: what was thought stays in the last message alone.
FORGETS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if loop.last else m.content.split('#')[-1] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALTERNATES = "{% if messages[0].role != 'user' %}{{ raise_exception('begin with a user') }}{% endif %}" + CHATML


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_char_tokenizer(folder)
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokens.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return folder


def tokenizer_with(folder: Path, template: str) -> ModelTokenizer:
    tokenizer = ModelTokenizer(folder)
    tokenizer.raw.chat_template = template
    return tokenizer


def messages_of(*contents: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(contents)]


def learnt(tokenizer: ModelTokenizer, *contents: str) -> list[str]:
    """What is learnt, run by run."""
    marked, runs = marked_conversation(messages_of(*contents), tokenizer), [[]]
    for token, is_learnt in zip(marked.ids, marked.is_learnt, strict=True):
        runs[-1].append(token) if is_learnt else runs.append([])
    return [tokenizer.raw.decode(run) for run in runs if run]


@given(st.lists(st.text("abc 1+\n", max_size=4), min_size=2, max_size=7), st.booleans())
@settings(max_examples=40, deadline=None)
def test_prefixes_find_what_transformers_finds_by_the_templates_marks(folder, contents, has_system):
    messages = [{"role": "system", "content": "be brief"}] * has_system + messages_of(*contents)
    expected = tokenizer_with(folder, MARKED).raw.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    for template in (CHATML, MARKED):
        found = marked_conversation(messages, tokenizer_with(folder, template))
        assert found.ids == list(expected["input_ids"])
        assert [int(mark) for mark in found.is_learnt] == list(expected["assistant_masks"])


def test_every_answer_is_learnt_with_the_token_that_ends_it(folder):
    assert learnt(tokenizer_with(folder, CHATML), "1+1=", "2", "2+2=", "4") == ["2<|im_end|>", "4<|im_end|>"]
    assert learnt(tokenizer_with(folder, NO_END), "1+1=", "2", "2+2=", "4") == ["2\n", "4\n"]


@pytest.mark.parametrize(
    ("template", "contents", "problem"),
    [
        (FORGETS, ["1+1=", "I add.#2", "2+2=", "4"], r"writes messages\[1\] or what precedes it otherwise"),
        (CHATML, ["1+1="], "marks no token as the assistant's"),
        (MARKED, ["1+1="], "marks no token as the assistant's"),
    ],
)
def test_what_is_ambiguous_or_nothing_is_refused(folder, template, contents, problem):
    with pytest.raises(ValueError, match=problem):
        marked_conversation(messages_of(*contents), tokenizer_with(folder, template))


def test_a_conversation_that_the_assistant_or_the_template_may_not_begin_is_refused(folder):
    turned = [{"role": "assistant", "content": "2"}, {"role": "user", "content": "?"}]
    with pytest.raises(ValueError, match="the first message is the assistant's"):
        marked_conversation(turned, tokenizer_with(folder, CHATML))
    with pytest.raises(ValueError, match="doesn't take its first 2 messages .*begin with a user.*set sft.turns"):
        marked_conversation(turned, tokenizer_with(folder, ALTERNATES))


def test_thoughts_that_a_template_forgets_are_learnt_where_it_marks_what_is_written(folder):
    kept = "{% generation %}{{ m.content if loop.last else m.content.split('#')[-1] }}"
    marks = MARKED.replace("{% generation %}{{ m.content }}", kept)
    found = learnt(tokenizer_with(folder, marks), "1+1=", "I add.#2", "2+2=", "So.#4")
    assert found == ["2<|im_end|>", "So.#4<|im_end|>"]
