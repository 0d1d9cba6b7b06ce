"""Environments that answer with messages: the model reads its own template's tokens behind its own untouched ones."""

from __future__ import annotations

import pytest
from tests.dataflow.stages.rollout.scripted import ended_row
from tests.support.tool_templates import renderer_of

from spmdrl.engines.environment.journal import Journal
from spmdrl.runtime.supervision.activity import activity
from spmdrl.runtime.workers.verdict import Verdict

PROMPT = [{"role": "user", "content": "How much?"}]
USER = {"role": "user", "content": "And <|im_end|> so?"}
RESULT = {"role": "tool", "name": "add", "content": "7"}


def conversation(*turns: dict) -> str:
    return renderer_of("qwen").rendered([*PROMPT, *turns], {}, add_generation_prompt=True)


def test_messages_follow_a_turn_as_the_template_writes_them_and_are_masked():
    turns = ["Well, <|im_end|>", "6 <|im_end|>"]
    response, prompt_ids = ended_row("Replying", "qwen", PROMPT, turns, {"replies": [[RESULT, USER]]})
    said = [{"role": "assistant", "content": text.removesuffix("<|im_end|>")} for text in turns]
    tokenizer = renderer_of("qwen").tokenizer
    expected = conversation(said[0], RESULT, USER, said[1]).removesuffix("\n<|im_start|>assistant\n")
    assert tokenizer.decode_all([*prompt_ids, *response.token_ids]) == expected
    written = [token for token, turn in zip(response.token_ids, response.turns, strict=True) if turn]
    assert written == [one for text in turns for one in tokenizer.encode(text)]
    assert set(response.turns) == {0, 1, 2} and response.outcome.reward == 1.0
    # Each message ends once: the mark in the user's is letters.
    end = tokenizer.encode("<|im_end|>")
    read = [token for token, turn in zip(response.token_ids, response.turns, strict=True) if not turn]
    assert len(end) == 1 and read.count(end[0]) == 2


def test_a_turn_that_a_stop_string_ended_gets_its_end_before_the_messages():
    response, prompt_ids = ended_row("Replying", "qwen", PROMPT, ["Well ="], {"replies": [[USER]]}, max_tokens=12)
    assert response.finish == "length" and set(response.turns) == {1}
    response, prompt_ids = ended_row("Replying", "qwen", PROMPT, ["Well =", "7"], {"replies": [[USER]]})
    said = ({"role": "assistant", "content": "Well ="}, USER)
    expected = conversation(*said) + "7"
    assert renderer_of("qwen").tokenizer.decode_all([*prompt_ids, *response.token_ids]) == expected


def test_a_prompt_that_begins_the_answer_is_followed_by_messages_too():
    begun = [*PROMPT, {"role": "assistant", "content": "It is"}]
    response, prompt_ids = ended_row("Replying", "qwen", begun, [" 6<|im_end|>", "7"], {"replies": [[USER]]})
    expected = conversation({"role": "assistant", "content": "It is 6"}, USER) + "7"
    assert renderer_of("qwen").tokenizer.decode_all([*prompt_ids, *response.token_ids]) == expected


@pytest.mark.parametrize(
    ("template", "prompt", "messages", "problem"),
    [
        ("qwen", PROMPT, [{"role": "system", "content": "x"}], "has the role 'system', but only user and tool"),
        ("qwen", PROMPT, [{"role": "tool", "content": "x"}], "lacks 'name'"),
        ("llama2", PROMPT, [RESULT], "doesn't write messages of the roles tool"),
        ("qwen", "How much?", [USER], "the prompt is plain text"),
        ("qwen", PROMPT, USER, "Reply(messages, reward)"),
        ("qwen", PROMPT, [{"role": "user", "content": "\ud800"}], "characters that UTF-8 has"),
        ("qwen", PROMPT, ["x"], "Reply(messages, reward)"),
    ],
)
def test_messages_that_cannot_be_read_end_the_row_with_the_reason(template, prompt, messages, problem):
    response, _ = ended_row("Replying", template, prompt, ["Well."], {"replies": [messages]})
    assert response.outcome.verdict is Verdict.MALFORMED and response.finish == "stop"
    assert problem in response.outcome.error


def test_messages_are_kept_and_repeated_as_observations_are(tmp_path):
    def ended():
        with activity.in_stage("generation", 1):
            return ended_row("Replying", "qwen", PROMPT, ["a", "b"], columns, journal=Journal(tmp_path, 0, 0, list))[0]

    columns = {"replies": [[USER, RESULT]]}
    ended()
    (path,) = (tmp_path / "environment").iterdir()
    assert '"messages"' in path.read_text()
    # The recorded answers stand: nothing is asked again.
    path.write_text(path.read_text().replace("so?", "hm?"))
    assert "hm?" in renderer_of("qwen").tokenizer.decode_all(ended().token_ids)
