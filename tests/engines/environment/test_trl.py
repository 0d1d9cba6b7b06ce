"""TRL's tools and environment factories: called as its trainers call them, with rows that end as theirs do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.dataflow.stages.rollout.scripted import ended_row
from tests.support.tool_templates import renderer_of

from spmdrl.engines.environment.environment_pool import EnvironmentPool
from spmdrl.engines.environment.episode import Episode, ToolCall, Turn
from spmdrl.engines.environment.journal import Journal
from spmdrl.engines.models.renderer import Renderer
from spmdrl.nouns.settings.reward_config import EnvironmentConfig
from spmdrl.runtime.supervision.activity import activity
from spmdrl.runtime.workers.verdict import Verdict

FILE = Path(__file__).with_name("trl_forms.py")
PROMPT = [{"role": "user", "content": "Please."}]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def tools(*names: str, isolation: str = "inline") -> EnvironmentConfig:
    return EnvironmentConfig(tools=tuple(f"{FILE}:{name}" for name in names), isolation=isolation)


def factory(name: str, isolation: str = "inline") -> EnvironmentConfig:
    return EnvironmentConfig(factory=f"{FILE}:{name}", isolation=isolation)


def run(config: EnvironmentConfig, turns: list[str], columns: dict | None = None, **how: Any) -> tuple[str, Any]:
    """The text of a row in which the model writes these turns, and its response."""
    with EnvironmentPool(config) as pool:
        facts = pool.facts
    renderer = Renderer(renderer_of("qwen").tokenizer, None, facts.tools, has_openings=facts.has_openings)
    turns = [f"{turn}<|im_end|>" for turn in turns]
    response, prompt_ids = ended_row(config, renderer, PROMPT, turns, columns, **how)
    return renderer.tokenizer.decode_all([*prompt_ids, *response.token_ids]), response


@pytest.mark.parametrize("isolation", ["inline", "process"])
def test_functions_are_called_by_name_until_a_turn_has_no_call(isolation):
    turns = [
        call("multiply", a=6, b=7) + call("wait", seconds=0.01),
        call("multiply", a=1) + call("divide") + "<tool_call>\n{\n</tool_call>",
        "It is 42.",
    ]
    text, response = run(tools("multiply", "wait", isolation=isolation), turns)
    answers = text.split("<tool_response>")
    assert '"name": "multiply"' in answers[0] and "The first integer." in answers[0]
    read = [part.partition("</tool_response>")[0].strip() for part in answers[1:]]
    assert read[:2] == ["42", "waited"]
    assert "missing 1 required positional argument: 'b'" in read[2] and read[2].startswith("{'error': ")
    assert read[3] == "{'error': 'Tool divide not found.'}" and "can't be read" in read[4] and len(read) == 5
    assert response.outcome is None and response.finish == "stop" and max(response.turns) == 3


@pytest.mark.parametrize("isolation", ["inline", pytest.param("process", marks=pytest.mark.slow)])
def test_an_object_per_row_begins_it_takes_calls_and_rewards_it(isolation):
    turns = [call("add", step=2), call("add", step=-1), call("add", step=1), "Done."]
    text, response = run(factory("Counter", isolation), turns, {"goal": 3, "answer": None})
    assert "<|im_start|>user\nPlease. Count to 3.<|im_end|>\n<|im_start|>assistant\n" in text
    assert "_secret" not in text and '"name": "reset"' not in text and '"name": "get_reward"' not in text
    assert [part.partition("</tool_response>")[0].strip() for part in text.split("<tool_response>")[1:]] == [
        "at 2",
        "{'error': 'only upwards'}",
        "at 3",
    ]
    assert response.outcome.reward == 1.0 and response.turns[0] == 0
    assert run(factory("Counter", isolation), ["No."], {"goal": 3})[1].outcome.reward == 0.0


def test_seconds_and_errors_are_counted_by_tool():
    with EnvironmentPool(tools("multiply", "wait", isolation="process")) as pool:
        for row, calls in enumerate((
            [ToolCall("multiply", {"a": 6, "b": 7}), ToolCall("wait", {"seconds": 0.02})],
            [ToolCall("multiply", {"a": 6}), ToolCall("wait", {"seconds": 0.02})],
            [ToolCall("divide", {})],
        )):  # fmt: skip
            pool.submit(row, Episode(PROMPT, {}, row, (), "", calls=tuple(calls)))
        pool.collect(range(3))
        figures = pool.take_figures()
        assert not pool.take_figures()
    assert (figures["errors/multiply"], figures["errors/wait"]) == ([0.0, 1.0], [0.0, 0.0])
    by_tool = {f"{what}/{tool}" for what in ("seconds", "errors") for tool in ("multiply", "wait")}
    assert figures.keys() == by_tool | {"open_seconds", "seconds"}, "not by names that the model made up"
    assert len(figures["seconds"]) == len(figures["open_seconds"]) == 3 and min(figures["seconds/wait"]) > 0.02


def test_errors_of_recorded_answers_are_counted_as_of_others(tmp_path):
    found = []
    for _ in range(2):
        with (
            activity.in_stage("generation", 1),
            EnvironmentPool(tools("multiply"), journal=Journal(tmp_path, 0, 0, list)) as pool,
        ):
            for row, arguments in enumerate(({"a": 6}, {"a": 6, "b": 7})):
                pool.submit(row, Episode(PROMPT, {}, row, (), "", calls=(ToolCall("multiply", arguments),)))
            pool.collect(range(2))
            found.append(pool.take_figures())
    assert found[0]["errors/multiply"] == found[1]["errors/multiply"] == [1.0, 0.0]


def test_functions_are_not_called_again_where_a_row_is_opened_again():
    again = (ToolCall("count", {}),)
    with EnvironmentPool(tools("count", isolation="process")) as pool:
        for turns, number in ((), "1"), ((Turn("", "1", calls=again),), "2"):
            pool.submit(0, Episode(PROMPT, {}, 0, turns, "", calls=again))
            (result,) = pool.collect([0])
            pool.end([0])
            assert result.observation.messages[0]["content"] == number


def test_a_row_without_an_opening_is_the_templates_own_and_rewards_may_be_awaited():
    text, response = run(factory("Awaiting"), ["Done."], {"goal": 1})
    assert "<|im_start|>user\nPlease.<|im_end|>\n<|im_start|>assistant\nDone.<|im_end|>" in text
    assert response.outcome.reward == 0.5


def test_an_opening_that_fails_or_has_no_room_ends_its_row():
    for name, columns, problem in (("Counter", {}, "'goal'"), ("Picturing", {}, "has parts of text alone")):
        _, response = run(factory(name), [], columns)
        assert response.outcome.verdict is Verdict.CRASHED and problem in response.outcome.error
        assert response.outcome.error.startswith("environment.factory: ") and not response.token_ids
    _, response = run(factory("Counter"), [], {"goal": 3}, max_tokens=4)
    assert response.outcome.verdict is Verdict.LEFT_OUT and response.end == "length", "nothing is there to be judged"


def test_a_recorded_opening_stands(tmp_path):
    def ended() -> str:
        with activity.in_stage("generation", 1):
            journal = Journal(tmp_path, 0, 0, list)
            return run(factory("Counter"), [call("add", step=3), "So."], {"goal": 3}, journal=journal)[0]

    ended()
    (path,) = (tmp_path / "environment").iterdir()
    path.write_text(path.read_text().replace("Count to 3", "Reach 3"))
    text = ended()
    assert "Please. Reach 3." in text and "at 3" in text


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (tools("multiply", "multiply"), "several functions are named multiply"),
        (tools("bare"), "environment.tools: .*no docstring"),
        (tools("multipl"), "environment.tools: .*did you mean 'multiply'"),
        (factory("Unreset"), "environment.factory: .*has no method reset"),
        (EnvironmentConfig(tools=("multiply",)), "environment.tools: 'multiply' is not module:function; write"),
    ],
)
def test_forms_that_cannot_be_used_are_refused_at_the_start(config, problem):
    with pytest.raises(ValueError, match=problem):
        EnvironmentPool(config)


def test_a_run_has_one_environment():
    with pytest.raises(ValueError, match=r"environment\.function and environment\.tools are set"):
        EnvironmentConfig("calculator", tools=("a.py:f",))
