"""Environments with tools: prompts name them, turns come with the calls that they hold, and results are read."""

from __future__ import annotations

import json
import sys

import pytest
from tests.dataflow.stages.rollout.environments import Adder
from tests.dataflow.stages.rollout.scripted import FILE, ended_row
from tests.support.tool_templates import QUOTED, renderer_of, specimen

from spmdrl.engines.environment.environment_pool import EnvironmentPool
from spmdrl.engines.environment.episode import Episode, ToolCall, Turn
from spmdrl.engines.environment.tool_calls import check_tools
from spmdrl.engines.models.renderer import Renderer
from spmdrl.engines.models.tokenizer import ModelTokenizer
from spmdrl.nouns.settings.data_config import RowNotRendered
from spmdrl.nouns.settings.reward_config import EnvironmentConfig

PROMPT = [{"role": "user", "content": "How much?"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def with_tools(name: str, tools: list = Adder.tools) -> Renderer:
    return Renderer(renderer_of(name).tokenizer, None, tools)


def last_turn() -> Turn:
    return sys.modules["spmdrl_file_environments"].Sums.last


def test_a_turns_calls_are_read_and_their_results_stand_behind_it():
    renderer = with_tools("qwen")
    turns = [
        f"<think>\nHm.\n</think>\n\nSo.\n{CALL}\n{CALL}<|im_end|>",
        "<tool_call>\n{a}\n</tool_call><|im_end|>",
        "6.5",
    ]
    response, prompt_ids = ended_row("Adder", renderer, PROMPT, turns)
    text = renderer.tokenizer.decode_all([*prompt_ids, *response.token_ids])
    assert '"description": "Add."' in text.partition("How much?")[0]
    assert text.count("<tool_response>\n3\n</tool_response>") == 2
    assert "can't be read" in text.partition("{a}")[2] and response.outcome.reward == 6.5
    assert (last_turn().content, last_turn().calls, last_turn().problems) == ("6.5", (), ())


@pytest.mark.parametrize("isolation", ["inline", "process"])
def test_calls_come_to_sessions_and_again_where_a_session_was_lost(isolation):
    call = ToolCall("add", {"a": 1, "b": [2]})
    earlier = (Turn("x", "3", content="So.", calls=(ToolCall("add", {"a": 1, "b": 2}),)),)
    with EnvironmentPool(EnvironmentConfig(f"{FILE}:Adder", isolation=isolation)) as pool:
        assert json.loads(json.dumps(Adder.tools)) == pool.facts.tools
        pool.submit("row", Episode("p", {}, 0, earlier, "y", content="7", reasoning="Hm."))
        assert pool.collect(["row"])[0].reward == 7.0
        pool.submit("row", Episode("p", {}, 0, (), "y", calls=(call,)))
        assert "TypeError" in pool.collect(["row"])[0].error
        if isolation == "inline":
            assert last_turn() == Turn("y", calls=(call,)) and sys.modules["spmdrl_file_environments"].Sums.stepped >= 3


def test_tools_of_the_data_stand_beside_those_of_the_environment_under_other_names():
    other = {"type": "function", "function": {"name": "sub", "description": "Subtract."}}
    text = with_tools("qwen").prompt_text(PROMPT, {"tools": [other]})
    assert "Add." in text and "Subtract." in text
    with pytest.raises(RowNotRendered, match="both have functions named add"):
        with_tools("qwen").prompt_text(PROMPT, {"tools": Adder.tools})


def test_a_prompt_of_plain_text_has_no_tools():
    with pytest.raises(RowNotRendered, match="set data.chat_template: always"):
        with_tools("qwen").prompt_text("How much?", {})


@pytest.mark.parametrize(
    ("template", "problem"),
    [(QUOTED, "can't be derived from the chat template, which writes"), ("{{ messages[0].content }}", "writes none"),
     ("{% if tools %}{% endif %}{{ messages[0].content }}", "can't be derived")],
)  # fmt: skip
def test_templates_without_tools_or_with_calls_of_unknown_form_are_refused_at_the_start(template, problem, tmp_path):
    tokenizer = ModelTokenizer(specimen("own", template.replace("{{ bos_token }}", "{{ tools }}")).make(tmp_path))
    with pytest.raises(ValueError, match=problem):
        check_tools(Renderer(tokenizer, None, Adder.tools))
    check_tools(with_tools("qwen"))


@pytest.mark.parametrize("tools", ["add", [{"function": {}}], [{"name": 1}], [7], 7, [{"name": "a", "x": {1}}]])
def test_tools_that_are_no_schemas_are_refused(tools, tmp_path):
    (tmp_path / "own.py").write_text(f"class Own:\n    tools = {tools!r}\n    def open(self, row): ...\n")
    with pytest.raises(ValueError, match=r"environment\.function: the environment's tools are"):
        EnvironmentPool(EnvironmentConfig(f"{tmp_path}/own.py:Own", isolation="inline"))
