"""Reading of what a model wrote: calls come back as they were rendered, and what can't be read is a message to it."""

from __future__ import annotations

import json
import re
from functools import cache
from os.path import commonprefix
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tool_templates import FOREIGN_ZOO, QUOTED, TOOL_ZOO, renderer_of, specimen

from spmdrl.engines.environment.episode import ToolCall, TurnParts
from spmdrl.engines.environment.tool_calls import TurnReader, find_forks
from spmdrl.engines.models.renderer import Renderer
from spmdrl.engines.models.tokenizer import ModelTokenizer
from spmdrl.nouns.settings.data_config import RowNotRendered

READ = ["qwen", "qwen3", "special_thoughts", "plain_thoughts", "special_tools", "lstrip", "normalized", "unigram"]
READ += [one.name for one in TOOL_ZOO if one.name != "quoted"]
FOREIGN = [one.name for one in FOREIGN_ZOO] or [pytest.param("", marks=pytest.mark.skip("CHAT_TEMPLATES names none"))]
# Templates that take one call in a turn, and those that take arguments as text.
ONE_CALL = {"single", "channels", "gptoss.jinja", "gptoss_training.jinja", "llama3_1.jinja", "llama3_2.jinja"}
TEXT_ARGUMENTS = {"fenced", "deepseekv3.jinja"}
ASKED = [{"role": "user", "content": "?"}]

NAMES = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_.-]{0,8}", fullmatch=True)
# Without what ends a value where values stand as they are.
TEXTS = st.text("ab{}[]:,\"\\ \n\té再'", max_size=8).map(lambda text: f"x{text}x")
VALUES = st.recursive(
    st.one_of(TEXTS, st.integers(-99, 99), st.booleans(), st.none(), st.floats(-1e3, 1e3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)), max_leaves=6,
)  # fmt: skip
CALLS = st.lists(st.builds(ToolCall, NAMES, st.dictionaries(NAMES, VALUES, max_size=4)), min_size=1, max_size=3)
CONTENTS = st.sampled_from(["", "Let me see.", "é <b> {x}"])
THOUGHTS = st.sampled_from(["", "Hm. {2}\nSo."])


def schema(call: ToolCall) -> dict[str, Any]:
    types = {key: {"type": "string"} if isinstance(value, str) else {} for key, value in call.arguments.items()}
    return {"type": "function", "function": {"name": call.name, "parameters": {"type": "object", "properties": types}}}


TOOLS = [schema(ToolCall("add", {"a": 1, "b": "x"}))]


@cache
def reader_of(name: str) -> TurnReader:
    return TurnReader(renderer_of(name))


def written(name: str, calls: list[ToolCall], content: str, thought: str, *, as_text: bool) -> str:
    """What a model writes in a turn with these calls, as the template has it behind the start of a turn."""
    given = [
        {"type": "function", "id": f"call{number:05d}", "function": {
            "name": call.name, "arguments": json.dumps(call.arguments) if as_text else call.arguments}}
        for number, call in enumerate(calls)
    ]  # fmt: skip
    turn = {"role": "assistant", "content": content, "tool_calls": given}
    turn |= {"reasoning_content": thought, "thinking": thought} if thought else {}
    renderer = renderer_of(name)
    text = renderer.rendered([*ASKED, turn], {})
    return behind_the_start(renderer, text)


def behind_the_start(renderer: Renderer, text: str) -> str:
    """Return what a model writes of a conversation's text."""
    begun = renderer.rendered(ASKED, {}, add_generation_prompt=True)
    common = begun if text.startswith(begun) else commonprefix([begun, text]).rstrip("<")
    return text[len(common) :].rstrip()


def check_calls(name: str, calls: list[ToolCall], content: str, thought: str) -> None:
    # Calls of one name could have arguments of other types.
    calls = list({call.name: call for call in calls}.values())
    try:
        text = written(name, calls, content, thought, as_text=name in TEXT_ARGUMENTS)
    except RowNotRendered:
        return
    got = reader_of(name).read(renderer_of(name).tokenizer.encode(text), [*map(schema, calls)])
    assert got.calls == tuple(calls) and not got.problems
    # Templates leave some of these out, and gpt-oss's thinks what stands in front of a call.
    if content in text and "channel" not in text:
        assert got.content == content
    assert got.reasoning == thought or thought not in text or content


@pytest.mark.parametrize("name", READ)
@given(calls=CALLS, content=CONTENTS, thought=THOUGHTS)
@settings(max_examples=10, deadline=None)
def test_calls_are_read_as_they_were_rendered(name, calls, content, thought):
    check_calls(name, calls[: 1 if name in ONE_CALL else None], content, thought)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*READ, *FOREIGN])
@given(calls=CALLS, content=CONTENTS, thought=THOUGHTS)
@settings(max_examples=60, deadline=None)
def test_calls_of_many_kinds_are_read_as_they_were_rendered(name, calls, content, thought):
    try:
        form = reader_of(name).form
    except (ValueError, RowNotRendered) as refused:
        assert "can't be derived" in str(refused) or "doesn't take" in str(refused)
        return
    assert form
    check_calls(name, calls[: 1 if name in ONE_CALL else None], content, thought)


@pytest.mark.parametrize("name", READ)
def test_a_turn_without_calls_is_read(name):
    reader, renderer = reader_of(name), renderer_of(name)
    text = renderer.rendered([*ASKED, {"role": "assistant", "content": "the {answer}"}], {})
    ids = renderer.tokenizer.encode(behind_the_start(renderer, text))
    assert reader.read(ids, TOOLS) == reader.read(ids) == TurnParts(content="the {answer}")


def read(name: str, text: str) -> TurnParts:
    return reader_of(name).read(renderer_of(name).tokenizer.encode(text), TOOLS)


ADD = (ToolCall("add", {"a": 1}),)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call><|im_end|>'),
        ("qwen", '<tool_call>\n[{"name": "add", "arguments": "{\\"a\\": 1}"}]'),
        ("coder", "</think><function=add><parameter=a>1</parameter></function>"),
        ("keyed", "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call><|observation|>"),
        ("single", ' {"name": "add", "parameters": {"a": 1}}<|eot_id|>'),
        ("listed", '[TOOL_CALLS][{"name":"add","arguments":{"a":1}}]</s>'),
        ("channels", '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'),
    ],
)
def test_calls_are_read_as_models_write_them(name, text):
    assert read(name, text).calls == ADD and not read(name, text).problems


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("qwen", '<tool_call>\n{"name": "add", "arguments": {"a": 1}\n</tool_call>', "Expecting ',' delimiter"),
        ("qwen", '<tool_call>\n{"arguments": {}}\n</tool_call>', "needs the function's name"),
        (
            "qwen",
            '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>',
            r"object of arguments, not 'add' and \[1\]",
        ),
        ("qwen", f'<tool_call>\n{{"name": "add", "arguments": {"[" * 20_000}', "recursion"),
        ("qwen", "<tool_call>", "Expecting value"),
        ("coder", "</think><tool_call>\n<function=add>\n<parameter=a>\n1", "'</function>' must follow"),
        ("coder", "</think><function=", "the function's name must follow"),
        ("single", '{"name": "add", "parameters": {"a": }}', "Expecting value"),
        ("channels", " to=functions.add<|message|>1", "a JSON object must follow"),
    ],
)
def test_a_call_that_cannot_be_read_is_a_message_to_the_model(name, text, problem):
    got = read(name, text)
    assert not got.calls and len(got.problems) == 1
    assert re.search(f"The tool call .* can't be read: .*{problem}", got.problems[0], re.DOTALL)


def test_a_call_behind_one_that_cannot_be_read_is_read():
    got = read(
        "qwen", 'Hm.<tool_call>{"name": }</tool_call>\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    )
    assert (got.content, got.calls, len(got.problems)) == ("Hm.", ADD, 1)


def test_json_that_is_no_call_is_content():
    assert read("single", '{"sum": 3}') == TurnParts(content='{"sum": 3}')


def test_a_value_in_tags_has_the_type_that_the_function_takes():
    text = "</think><function=add>"
    text += "<parameter=a>1</parameter><parameter=b>2</parameter><parameter=c>True</parameter></function>"
    assert read("coder", text).calls == (ToolCall("add", {"a": 1, "b": "2", "c": True}),)


@pytest.mark.parametrize(
    ("name", "text"), [("coder", "Hm"), ("qwen3", "<think>\nHm"), ("channels", "<|channel|>analysis<|message|>Hm")]
)
def test_a_thought_that_is_not_closed_is_all_of_the_turn(name, text):
    assert read(name, text) == TurnParts(content="", reasoning="Hm")


def test_channels_are_taken_apart():
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert read("channels", f"{thought}<|channel|>final<|message|>So.<|return|>") == TurnParts(
        content="So.", reasoning="Hm."
    )
    assert read("channels", "<|channel|>final<|message|>So.<|return|>") == TurnParts(content="So.")


def test_turns_are_compared_behind_the_messages_that_an_environment_may_send():
    def roles(own_tools: list | None, **how: bool) -> list[str]:
        renderer = Renderer(renderer_of("qwen3").tokenizer, None, own_tools, **how)
        prompt = "Plain text." if how else ASKED
        return [line.split("'s message follows")[0].split()[-1] for line in find_forks(renderer, prompt, {})]

    assert roles(TOOLS) == ["tool"] and roles([]) == ["user", "user"] and roles(None) == []
    assert roles([], has_openings=True, has_own_prompts=True) == ["user", "user", "tool"]


def test_a_form_that_cannot_be_derived_is_refused_with_a_way_out():
    with pytest.raises(ValueError, match=r'<\|tool_call>call:plum_a.*"response_template" in tokenizer_config.json'):
        read("quoted", "Hm")
    with pytest.raises(ValueError, match="which writes none"):
        read("llama3", "Hm")


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> TurnReader:
    """A tokenizer that describes its own responses, as Gemma 4's do."""
    folder = specimen("quoted", QUOTED).make(tmp_path_factory.mktemp("described"))
    mark = '<|"|>'
    call = {
        "open_pattern": r"<\|tool_call>call:(?P<name>\w+)", "close": "<tool_call|>", "repeats": True, "content": "json",
        "content_args": {"string_delims": [[mark, mark]], "unquoted_keys": True},
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    }  # fmt: skip
    ends = {"close_pattern": r"(?:<turn\|>|<\|tool_response>)\s*|$", "content": "text"}
    template = {"start_anchor": "<|turn>model\n", "fields": {"tool_calls": call, "content": ends}}
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"response_template": template}))
    return TurnReader(Renderer(ModelTokenizer(folder)))


def test_a_tokenizers_own_response_template_reads_its_turns(described):
    if not hasattr(described._tokenizer.raw, "response_template"):
        pytest.skip("transformers is older than response templates")
    encode = described._tokenizer.encode
    text = 'So.<|tool_call>call:add{a:1,b:<|"|>{x}<|"|>}<tool_call|><|tool_response>'
    assert described.read(encode(text), TOOLS) == TurnParts(
        content="So.", calls=(ToolCall("add", {"a": 1, "b": "{x}"}),)
    )
    got = described.read(encode("<|tool_call>call:add{a:}<tool_call|><|tool_response>"), TOOLS)
    assert not got.calls and "The turn can't be read: json" in got.problems[0]
