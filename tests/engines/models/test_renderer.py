"""Text to tokens: prompts, answers and conversations are the template's own text, whatever the tokenizer."""

from __future__ import annotations

import json
import re
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from spmdrl.engines.models.make_model import make_char_tokenizer
from spmdrl.engines.models.renderer import Renderer
from spmdrl.engines.models.tokenizer import ModelTokenizer
from spmdrl.nouns.settings.data_config import RowNotRendered, TemplateOptions
from tests.support.text_models import CHATML, LLAMA2, LLAMA3, byte_fallback_folder, byte_level_folder
from tests.support.tokenizer_zoo import ZOO

pytestmark = pytest.mark.oldest

PLAIN = (
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
ALTERNATES = "{% if messages[0].role != 'user' %}{{ raise_exception('begin with a user') }}{% endif %}" + PLAIN
# The system's message stands in the last message of the user, while that isn't answered.
MOVES_SYSTEM = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}{{ bos_token }}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ system + '|' if system and loop.last }}{{ m.content }}"
    "[/INST]{% elif m.role == 'assistant' %} {{ m.content }}{% for c in m.tool_calls or [] %}{{ c | tojson }}"
    "{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"
)
# Generation begins with a thought, which conversations don't have.
THINKS = PLAIN.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}").replace(
    "{{ m.content }}", "{{ m.content.split('</think>')[-1] }}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A char tokenizer with <eos> as its end token and ChatML's two tokens beside it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_char_tokenizer(folder)
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokens.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return folder


def renderer_with(folder: Path, template: str | None, **options: Any) -> Renderer:
    tokenizer = ModelTokenizer(folder)
    tokenizer.raw.chat_template = template
    return Renderer(tokenizer, TemplateOptions(**options))


def messages_of(*contents: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(contents)]


def learnt(renderer: Renderer, *contents: str) -> list[str]:
    """What is learnt, run by run."""
    marked, runs = renderer.conversation(messages_of(*contents), {}), [[]]
    for token, is_learnt in zip(marked.ids, marked.is_learnt, strict=True):
        runs[-1].append(token) if is_learnt else runs.append([])
    return [renderer.tokenizer.raw.decode(run) for run in runs if run]


def parts(renderer: Renderer, prompt: Any, answer: Any, **columns: Any) -> tuple[str, str]:
    """Prompt and answer as they are learnt, as text with its special tokens."""
    marked, raw = renderer.answer(prompt, answer, columns), renderer.tokenizer.raw
    size = marked.is_learnt.index(True)
    assert all(marked.is_learnt[size:])
    return raw.decode(marked.ids[:size]), raw.decode(marked.ids[size:])


USER = [{"role": "user", "content": "1+1="}]
CALL = {"function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@cache
def renderer_of(kind: str) -> Renderer:
    """One of the shapes that people have."""
    make = {
        "chatml": partial(byte_level_folder, template=CHATML, eos="<|im_end|>"),
        "chatml, other eos": partial(byte_level_folder, template=CHATML),
        "llama 3, two begin tokens": partial(byte_level_folder, template=LLAMA3, post="<s> $A"),
        "llama 3, eos added": partial(byte_level_folder, template=LLAMA3, post="<s> $A </s>", eos="<|eot|>"),
        "llama 2": partial(byte_fallback_folder, template=LLAMA2),
        "system moves": partial(byte_level_folder, template=MOVES_SYSTEM, post="<s> $A"),
    }
    with TemporaryDirectory() as folder:
        # All is in memory once it is loaded.
        return Renderer(ModelTokenizer(make[kind](Path(folder))))


KINDS = ["chatml", "chatml, other eos", "llama 3, two begin tokens", "llama 3, eos added", "llama 2", "system moves"]
TEXTS = st.text("ab 1+=\n<é", min_size=1, max_size=6).filter(str.strip)


@pytest.mark.parametrize("kind", KINDS)
@given(st.lists(TEXTS, min_size=2, max_size=6).filter(lambda texts: len(texts) % 2 == 0))
@settings(max_examples=40, deadline=None)
def test_a_prompt_and_its_answer_are_the_templates_own_text_through_the_end_of_turn(kind, texts):
    renderer = renderer_of(kind)
    raw, messages = renderer.tokenizer.raw, messages_of(*texts)
    whole = raw.apply_chat_template(messages, tokenize=False)
    end = renderer.end_of_turn.text
    marked = renderer.answer(messages[:-1], texts[-1], {})
    own = whole[: whole.rindex(end) + len(end)]
    assert raw.decode(marked.ids) == raw.decode(raw(own, add_special_tokens=False)["input_ids"])
    size = marked.is_learnt.index(True)
    tokenized = renderer.prompts([messages[:-1]])
    assert tokenized.prompt_ids(0) == tuple(marked.ids[:size]), "generation answers the prompt that is learnt"
    asked = raw.apply_chat_template(messages[:-1], tokenize=True, add_generation_prompt=True, return_dict=True)
    assert list(tokenized.prompt_ids(0)) == list(asked["input_ids"])
    assert marked.ids.count(renderer.end_of_turn.token_id) == raw.decode(marked.ids).count(end)
    assert marked.ids.count(raw.bos_token_id) == raw.decode(marked.ids).count("<s>") <= 1


@pytest.mark.parametrize(
    ("post", "before"), [(None, []), ("<s> $A", ["<s>"]), ("<s> $A </s>", ["<s>"]), ("$A </s>", [])]
)
def test_plain_text_begins_as_the_tokenizer_begins_it_and_ends_once(tmp_path, post, before):
    renderer = Renderer(ModelTokenizer(byte_level_folder(tmp_path, post=post)))
    raw = renderer.tokenizer.raw
    begun = raw.convert_tokens_to_ids(before)
    bare = raw("1+1=", add_special_tokens=False)["input_ids"]
    assert list(renderer.prompts(["1+1="]).prompt_ids(0)) == begun + bare
    for answer in ("2", "2</s>"):
        assert renderer.answer("1+1=", answer, {}).ids == [
            *begun,
            *bare,
            *raw("2</s>", add_special_tokens=False)["input_ids"],
        ]
    assert list(renderer.prompts(["<s>1+1="]).prompt_ids(0)) == raw("<s>1+1=", add_special_tokens=False)["input_ids"]


def test_all_that_a_template_writes_of_the_last_message_is_learnt():
    renderer = renderer_of("chatml, other eos")
    message = {"role": "assistant", "content": "Sure.", "reasoning_content": "Hm", "tool_calls": [CALL]}
    _, answer = parts(renderer, USER, message)
    assert answer == f"<think>\nHm\n</think>\n\nSure.\n<tool_call>{json.dumps(CALL)}</tool_call><|im_end|>"
    for content in ({"content": None}, {"content": ""}, {}):
        message = {"role": "assistant", "tool_calls": [CALL], "reasoning_content": None, **content}
        assert parts(renderer, USER, message)[1] == f"\n<tool_call>{json.dumps(CALL)}</tool_call><|im_end|>"


def test_null_entries_of_struct_columns_reach_no_template():
    renderer = renderer_of("chatml")
    padded = [
        {**USER[0], "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [{**CALL, "id": None}]},
    ]
    asked = [*padded, {"role": "tool", "content": "2", "tool_calls": None}]
    assert "null" not in renderer.prompt_text(asked, {}) and "None" not in renderer.prompt_text(asked, {})


@pytest.mark.parametrize("begun", ["Let me think.\n<think>", "2 ", "2\n\n", " 2", ""])
@pytest.mark.parametrize("kind", ["chatml", "llama 2", "system moves"])
def test_a_prompt_that_ends_with_the_assistants_message_is_continued(kind, begun):
    renderer = renderer_of(kind)
    prompt = [*USER, {"role": "assistant", "content": begun}]
    text = renderer.prompt_text(prompt, {})
    own = renderer.tokenizer.raw.apply_chat_template(
        [*USER, {"role": "assistant", "content": begun + "END"}], tokenize=False
    )
    assert text.endswith(begun) and text == own[: own.index("END")]
    _, answer = parts(renderer, prompt, "more")
    assert answer.removesuffix(renderer.end_of_turn.text).strip() == "more"


def test_a_prompt_that_cannot_be_continued_is_refused(folder):
    renderer = renderer_of("chatml")
    tokenized = renderer.prompts([USER, [*USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}]])
    assert "ends with the assistant's tool calls" in tokenized.problems[1] and tokenized.length(1) == 0
    drops = renderer_with(folder, PLAIN.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}"))
    with pytest.raises(RowNotRendered, match="doesn't write all of the assistant's last message"):
        drops.prompt_text([*USER, {"role": "assistant", "content": "<think>a</think>b"}], {})


def test_tools_and_values_of_the_row_reach_the_template():
    renderer = renderer_of("chatml")
    for tools in ([TOOL], json.dumps([TOOL]), [json.dumps(TOOL)], [{**TOOL, "strict": None}]):
        assert json.dumps(TOOL) in renderer.prompt_text(USER, {"tools": tools})
        assert json.dumps(TOOL) in parts(renderer, USER, "2", tools=tools)[0]
    assert "Tools" not in renderer.prompt_text(USER, {"tools": None})
    with pytest.raises(RowNotRendered, match="'tools' is 'a hammer'"):
        renderer.prompt_text(USER, {"tools": "a hammer"})
    brief = Renderer(renderer.tokenizer, TemplateOptions(kwargs={"enable_thinking": False}))
    assert brief.prompt_text(USER, {}).endswith("</think>\n\n")
    assert not brief.prompt_text(USER, {"chat_template_kwargs": {"enable_thinking": True}}).endswith("</think>\n\n")
    with pytest.raises(RowNotRendered, match="chat_template_kwargs has tokenize, which the renderer itself sets"):
        brief.prompt_text(USER, {"chat_template_kwargs": {"tokenize": True}})


def test_a_system_prompt_stands_before_conversations_that_have_none():
    chatml = Renderer(renderer_of("chatml").tokenizer, TemplateOptions(system_prompt="Be brief"))
    assert chatml.prompt_text(USER, {}).startswith("<|im_start|>system\nBe brief<|im_end|>")
    own = [{"role": "system", "content": "Sing"}, *USER]
    assert "Be brief" not in chatml.prompt_text(own, {}) and "Be brief" in parts(chatml, USER, "2")[0]
    ours = {"system_prompt": "Sing"}
    assert "Sing" in chatml.prompt_text(USER, ours) and "Sing" in parts(chatml, USER, "2", **ours)[0]
    whole = chatml.conversation([*USER, {"role": "assistant", "content": "2"}], ours)
    assert "Sing" in chatml.tokenizer.raw.decode(whole.ids)
    assert "Be brief" in chatml.prompt_text(USER, {"system_prompt": None})
    with pytest.raises(RowNotRendered, match="'system_prompt' is 3, but must be a text"):
        chatml.prompt_text(USER, {"system_prompt": 3})
    llama2 = Renderer(renderer_of("llama 2").tokenizer, TemplateOptions(system_prompt="Be brief"))
    assert "no system messages here" in llama2.prompts([USER]).problems[0]


def test_a_file_replaces_the_tokenizers_template(tmp_path):
    (tmp_path / "mine.jinja").write_text(NO_END)
    renderer = Renderer(renderer_of("chatml").tokenizer, TemplateOptions(file=str(tmp_path / "mine.jinja")))
    assert renderer.prompt_text(USER, {}) == "user: 1+1=\nassistant: "
    assert renderer_of("chatml").prompt_text(USER, {}).startswith("<|im_start|>"), "the tokenizer that was given stays"
    (tmp_path / "mine.jinja").write_text("{% for %}")
    with pytest.raises(ValueError, match="mine.jinja, line 1, is broken"):
        Renderer(renderer.tokenizer, renderer.options).prompts([USER])
    with pytest.raises(ValueError, match="chat_template_file .*missing.jinja can't be read"):
        Renderer(renderer.tokenizer, TemplateOptions(file=str(tmp_path / "missing.jinja")))


@pytest.mark.parametrize("key", ["kwargs", "file", "system_prompt"])
def test_options_that_no_template_would_read_are_refused(key):
    with pytest.raises(ValueError, match="data.chat_template is never, but"):
        TemplateOptions("never", **{key: {"a": 1} if key == "kwargs" else "text"})


def test_an_answer_is_found_where_the_template_moves_what_precedes_it():
    renderer, asked = renderer_of("system moves"), [{"role": "system", "content": "Add"}, *USER]
    assert parts(renderer, asked, "2") == ("<s>[INST] Add|1+1=[/INST]", " 2</s>")
    message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert parts(renderer, asked, message)[1] == f" {json.dumps(CALL)}</s>"


def test_an_answer_goes_on_from_a_thought_that_generation_begins_with(folder):
    renderer = renderer_with(folder, THINKS)
    prompt = "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n<think>\n"
    for answer in ("I add.</think>2", "<think>\nI add.</think>2"):
        assert parts(renderer, USER, answer) == (prompt, "I add.</think>2<|im_end|>")
    with pytest.raises(RowNotRendered, match=r"begins an answer with '<think>\\n', but writes none so"):
        renderer.answer(USER, "2", {})


def test_what_a_template_writes_behind_the_end_of_turn_is_not_learnt(folder):
    renderer = renderer_with(folder, PLAIN + "{% if not add_generation_prompt %}<eos>{% endif %}")
    assert parts(renderer, USER, "2")[1] == "2<|im_end|>"


def test_an_answer_without_an_end_of_turn_ends_with_the_stop_token(folder):
    assert parts(renderer_with(folder, NO_END), USER, "2")[1] == "2<eos>"


@pytest.mark.parametrize(
    ("rows", "options", "line"),
    [
        ((3, 0), {}, "prompts are text, for which the chat template of .*set data.chat_template: always"),
        ((3, 0, ["tools"]), {"use": "never"}, "the column tools: not used"),
        ((3, 0, ["system_prompt"]), {"use": "never"}, "the column system_prompt: not used"),
        ((3, 0), {"system_prompt": "Add"}, "data.system_prompt: not used"),
        ((0, 3, ["tools"]), {}, "the column tools isn't used: the chat template of .* has no tools"),
        ((0, 3), {}, "the chat template ends answers with '<|im_end|>' .* but responses stop at '<eos>' "),
    ],
)
def test_what_isnt_used_or_disagrees_is_named_in_one_line(folder, rows, options, line):
    lines = renderer_with(folder, PLAIN, **options).warnings(*rows)
    assert any(re.search(line.replace("|", r"\|"), one) for one in lines), lines
    assert all(one.startswith("WARNING: ") and "\n" not in one for one in lines)


def test_names_that_nothing_sets_and_options_that_nothing_reads_are_named(folder, tmp_path):
    template = tmp_path / "own.jinja"
    template.write_text(
        PLAIN + "{{ mesages }}{{ bos_token }}{% if thinking %}{{ thinking }}{% endif %}{{ x | default }}"
    )
    lines = renderer_with(folder, PLAIN, file=str(template)).warnings(0, 3)
    assert any(line.endswith("own.jinja reads mesages, which only rows' kwargs could set") for line in lines), lines
    lines = renderer_with(folder, PLAIN, kwargs={"enable_thinkin": True}).warnings(0, 3)
    assert any("doesn't read enable_thinkin of data.chat_template_kwargs" in line for line in lines), lines


def test_no_template_of_the_zoo_is_thought_to_read_a_name_that_nothing_sets(folder, tmp_path):
    template = tmp_path / "own.jinja"
    for text in {entry.template for entry in ZOO}:
        template.write_text(text)
        lines = renderer_with(folder, PLAIN, file=str(template)).warnings(0, 3)
        assert not any("which only rows' kwargs" in line for line in lines), lines


def test_nothing_is_named_where_all_is_used(folder):
    assert renderer_with(folder, None).warnings(3, 0) == []
    assert renderer_with(folder, PLAIN, use="never").warnings(3, 0) == []
    assert renderer_of("chatml").warnings(0, 3, ["tools"]) == []


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}<eos>{% endfor %}",
        NO_END,
        "<|im_start|>{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
        "{{ raise_exception('a system message must come first') }}",
        "{{ messages[0",
    ],
    ids=["end token", "no special token", "no answers", "raises", "broken"],
)
def test_templates_without_another_end_of_turn_bring_no_warning(template, folder):
    assert renderer_with(folder, template).warnings(0, 1) == []


@given(st.lists(st.text("abc 1+\n", max_size=4), min_size=2, max_size=7), st.booleans())
@settings(max_examples=40, deadline=None)
def test_prefixes_find_what_transformers_finds_by_the_templates_marks(folder, contents, has_system):
    messages = [{"role": "system", "content": "be brief"}] * has_system + messages_of(*contents)
    expected = renderer_with(folder, MARKED).tokenizer.raw.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    for template in (PLAIN, MARKED):
        found = renderer_with(folder, template).conversation(messages, {})
        assert found.ids == list(expected["input_ids"])
        assert [int(mark) for mark in found.is_learnt] == list(expected["assistant_masks"])


def test_every_answer_is_learnt_with_the_token_that_ends_it(folder):
    assert learnt(renderer_with(folder, PLAIN), "1+1=", "2", "2+2=", "4") == ["2<|im_end|>", "4<|im_end|>"]
    assert learnt(renderer_with(folder, NO_END), "1+1=", "2", "2+2=", "4") == ["2\n", "4\n"]


@pytest.mark.parametrize(
    ("template", "contents", "problem"),
    [
        (FORGETS, ["1+1=", "I add.#2", "2+2=", "4"], r"writes messages\[1\] or what precedes it otherwise"),
        (PLAIN, ["1+1="], "marks no token as the assistant's"),
        (MARKED, ["1+1="], "marks no token as the assistant's"),
    ],
)
def test_what_is_ambiguous_or_nothing_is_refused(folder, template, contents, problem):
    with pytest.raises(ValueError, match=problem):
        renderer_with(folder, template).conversation(messages_of(*contents), {})


def test_a_conversation_that_the_assistant_or_the_template_may_not_begin_is_refused(folder):
    turned = [{"role": "assistant", "content": "2"}, {"role": "user", "content": "?"}]
    with pytest.raises(ValueError, match="the first message is the assistant's"):
        renderer_with(folder, PLAIN).conversation(turned, {})
    with pytest.raises(ValueError, match="doesn't take its first 2 messages .*begin with a user"):
        renderer_with(folder, ALTERNATES).conversation(turned, {})


def test_thoughts_that_a_template_forgets_are_learnt_where_it_marks_what_is_written(folder):
    kept = "{% generation %}{{ m.content if loop.last else m.content.split('#')[-1] }}"
    marks = MARKED.replace("{% generation %}{{ m.content }}", kept)
    found = learnt(renderer_with(folder, marks), "1+1=", "I add.#2", "2+2=", "So.#4")
    assert found == ["2<|im_end|>", "So.#4<|im_end|>"]
