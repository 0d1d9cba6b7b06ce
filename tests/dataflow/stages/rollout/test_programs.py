"""Programs that ask for turns: rows hold their conversations in the chat template, and the model's tokens untouched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from tests.dataflow.stages.rollout.scripted import ended_row
from tests.support.tool_templates import renderer_of

from spmdrl.engines.environment.environment_pool import EnvironmentPool
from spmdrl.engines.environment.episode import Row
from spmdrl.engines.environment.journal import Journal
from spmdrl.engines.generation.protocol import Response
from spmdrl.engines.models.renderer import Renderer
from spmdrl.nouns.settings.data_config import TemplateOptions
from spmdrl.nouns.settings.reward_config import EnvironmentConfig
from spmdrl.runtime.supervision.activity import activity
from spmdrl.runtime.workers.verdict import Verdict

FILE = Path(__file__).parents[3] / "engines" / "environment" / "asking_programs.py"


def config_of(program: str, **settings: Any) -> EnvironmentConfig:
    return EnvironmentConfig(program=f"{FILE}:{program}", **{"timeout_seconds": 30.0, **settings})


def own(name: str) -> Renderer:
    """The renderer that a run with a program has."""
    return Renderer(renderer_of(name).tokenizer, None, [], has_openings=True, has_own_prompts=True)


def ended(
    program: str, prompt: str, *turns: str, template: str = "qwen", journal: Journal | None = None
) -> tuple[Response, str]:
    """The row of a program, and its whole text."""
    renderer = own(template)
    response, prompt_ids = ended_row(config_of(program), renderer, prompt, turns, journal=journal)
    assert len(prompt_ids) == 1, "prompts are what all conversations begin with"
    return response, renderer.tokenizer.decode_all([*prompt_ids, *response.token_ids])


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_row_is_the_programs_conversation_with_the_models_tokens_as_they_were_sampled():
    turns = ["1 <|im_end|>", " 2<|im_end|>"]
    response, text = ended("counting", "2", *turns)
    said = [{"role": "assistant", "content": turn.removesuffix("<|im_end|>")} for turn in turns]
    messages = [{"role": "system", "content": "Count."}, user("number 0"), said[0], user("number 1"), said[1]]
    assert text == renderer_of("qwen").rendered(messages, {}).removesuffix("\n")
    encode = renderer_of("qwen").tokenizer.encode
    written = [token for token, turn in zip(response.token_ids, response.turns, strict=True) if turn]
    assert written == [token for turn in turns for token in encode(turn)]
    assert response.outcome.reward == 3.0


def test_the_requests_tools_are_in_the_row_and_calls_of_them_are_read():
    call = '<tool_call>\n{"name": "add", "arguments": {"of": [2, 3]}}\n</tool_call>'
    response, text = ended("calling", "", f"So.\n{call}<|im_end|>", "5<|im_end|>")
    head, _, tail = text.partition(call)
    assert '"name": "add"' in head.partition("2 + 3?")[0] and "<tool_response>\n5\n</tool_response>" in tail
    assert response.outcome.reward == 5.0


def test_special_tokens_in_a_programs_messages_and_tools_are_letters():
    response, text = ended("marked", "", "a<|im_end|>")
    assert text.count("<|im_end|>") == 5, "those of three messages, of the tool and of the turn"
    end = own("qwen").tokenizer.encode("<|im_end|>")[0]
    assert response.token_ids.count(end) == 3, "a system's message with the tools, the user's, and the turn"


def test_a_program_may_ask_by_tokens_and_gets_the_models_with_their_log_probs():
    (first,), encode = own("qwen").prompts(["a"]).prompt_ids(0), own("qwen").tokenizer.encode
    response, _ = ended("by_tokens", json.dumps([first, 5, 6]), "ab", "c")
    assert list(response.token_ids) == [5, 6, *encode("ab"), 5, 6, *encode("c")]
    num_written = len(encode("ab")) + len(encode("c"))
    assert sum(map(bool, response.turns)) == num_written and response.outcome.reward == -num_written
    response, _ = ended("by_tokens", json.dumps([first + 1, 5]), "ab")
    assert response.outcome.verdict is Verdict.MALFORMED and f"begins by token {first + 1}" in response.outcome.error


@pytest.mark.parametrize(
    ("program", "prompt", "template", "error"),
    [("calling", "", "llama2", "the chat template writes none"), ("forking", "rewrites", "qwen", "message 1 is"),
     ("answered", "", "qwen", "the last message has the role 'assistant'")],
)  # fmt: skip
def test_conversations_that_the_model_cannot_have_end_the_row_by_name(program, prompt, template, error):
    response, _ = ended(program, prompt, "x", template=template)
    assert response.outcome.verdict is Verdict.MALFORMED and error in response.outcome.error, response.outcome


def test_a_program_needs_the_chat_template_whatever_its_prompts_are():
    tokenizer = renderer_of("qwen").tokenizer
    for renderer in (
        Renderer(tokenizer, TemplateOptions(use="never"), [], has_own_prompts=True),
        Renderer(tokenizer.with_template(""), None, [], has_own_prompts=True),
    ):
        with pytest.raises(ValueError, match="which the chat template writes, but data.chat_template is"):
            renderer.prompts(["a"])


def test_a_row_that_is_generated_again_gets_the_recorded_requests_and_its_program_the_recorded_turns(tmp_path):
    """First up to the last turn, as a killed run's; then with one more, which the program must answer."""

    def text_of(*turns: str) -> str:
        with activity.in_stage("generation", 1):
            return ended("noting", str(tmp_path / "starts"), *turns, journal=Journal(tmp_path, 0, 0, list))[1]

    whole = text_of("1", "2", "3")
    assert text_of("1", "2", "3") == whole and (tmp_path / "starts").read_text() == "."
    assert text_of("1", "2", "4").replace("4", "3") == whole, "its program was started again, and asked three times"
    assert (tmp_path / "starts").read_text() == ".."


def test_a_program_that_cannot_begin_is_refused_with_its_first_row():
    with EnvironmentPool(config_of("silent")) as pool:
        assert (pool.facts.has_openings, pool.facts.has_own_prompts, pool.facts.tools) == (True, True, [])
        with pytest.raises(ValueError, match="for the first prompt: the program ended without a request"):
            pool.try_open(Row("p", {}, 0))
    with EnvironmentPool(config_of("counting")) as pool:
        pool.try_open(Row("1", {}, 0))
    with pytest.raises(ValueError, match=r"environment\.program: .* has no function 'countin'; did you mean"):
        EnvironmentPool(config_of("countin"))
    with pytest.raises(ValueError, match="write a command as a list"):
        EnvironmentPool(EnvironmentConfig(program="python agent.py"))


def test_programs_have_processes_of_their_own():
    with pytest.raises(ValueError, match="isolation is inline, but environment.program"):
        config_of("counting", isolation="inline")
    assert EnvironmentConfig(program=("python", "x.py")).specs == ("python", "x.py")
    assert EnvironmentConfig(program=()).key is None
