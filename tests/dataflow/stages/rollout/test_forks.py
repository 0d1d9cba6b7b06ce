"""Conversations that fork: a row's next piece is the conversation as the template writes it then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from tests.dataflow.stages.rollout.scripted import FILE, ended_row
from tests.dataflow.stages.rollout.test_tools import CALL, with_tools
from tests.engines.training.tiny import SPARSE
from tests.support.tool_templates import renderer_of

from spmdrl.dataflow.stages.rollout.requests import columns_of
from spmdrl.dataflow.stages.rows import BEGINS_PIECE, ROUTED_EXPERTS, TURNS, token_rows
from spmdrl.engines.environment.journal import Journal
from spmdrl.engines.generation.protocol import Response
from spmdrl.engines.models.renderer import Renderer
from spmdrl.nouns.settings.data_config import thought
from spmdrl.nouns.settings.reward_config import EnvironmentConfig
from spmdrl.runtime.supervision.activity import activity
from spmdrl.runtime.workers.verdict import Verdict

PROMPT = [{"role": "user", "content": "How much?"}]
FIRST, SECOND = ({"role": "user", "content": text} for text in ("And é so?", "Well?"))
RESULT = {"role": "tool", "name": "add", "content": "7"}
THINKING = "<think>\nHm.\n</think>\n\n"


def said(content: str, reasoning: str = "", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more, **(thought(reasoning) if reasoning else {})}


def written(renderer: Renderer, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> list[int]:
    """A request's tokens by transformers alone."""
    raw = renderer.tokenizer.raw
    how = {"tokenize": True, "add_generation_prompt": True, "return_dict": True, "tools": tools}
    return raw.apply_chat_template(list(messages), **how)["input_ids"]


def split_row(
    environment: str, renderer: Renderer | str, turns: Sequence[str], columns: dict[str, Any], prompt: Any = PROMPT,
    on_fork: str = "split", **how: Any,
) -> tuple[Response, list[tuple[int, ...]]]:  # fmt: skip
    """A row, and the prompts of its requests to the engine."""
    config = EnvironmentConfig(f"{FILE}:{environment}", isolation="inline", on_fork=on_fork)
    asked: list[tuple[int, ...]] = []
    response, _ = ended_row(config, renderer, prompt, turns, columns, asked=asked, **how)
    return response, asked


def begins(response: Response) -> list[int]:
    return [place for place, turn in enumerate(response.turns) if turn == BEGINS_PIECE]


@pytest.mark.parametrize("template", ["qwen3", "special_thoughts", "plain_thoughts"])
def test_the_model_reads_each_turn_as_transformers_writes_the_conversation_without_earlier_thoughts(template):
    renderer = renderer_of(template)
    turns = [f"{THINKING}6?<|im_end|>", "7<|im_end|>", f"{THINKING}8<|im_end|>", "9"]
    replies = [[FIRST], [SECOND], [FIRST]]
    response, asked = split_row("Replying", renderer, turns, {"replies": replies})
    messages = [*PROMPT, said("6?", "Hm."), FIRST, said("7"), SECOND, said("8", "Hm."), FIRST]
    expected = [written(renderer, messages[:stop]) for stop in (1, 3, 5, 7)]
    assert [list(ids) for ids in asked] == expected
    # The second turn is as the template leaves it: the third continues its piece.
    (second, fourth), encode = begins(response), renderer.tokenizer.encode
    ids, pieces = list(response.token_ids), [expected[0], expected[2], expected[3]]
    assert ids[:second] == encode(turns[0]), "what is trained there is what was written"
    assert ids[second:fourth] == [*pieces[1], *encode(turns[2])] and ids[fourth:] == [*pieces[2], *encode("9")]
    own = [token for token, turn in zip(ids, response.turns, strict=True) if turn > 0]
    assert own == [token for text in turns for token in encode(text)] and response.outcome.reward == 1.0


def test_calls_and_their_results_keep_the_thought_until_the_user_speaks():
    """Arguments of this template are in tags, its prompts begin a thought."""
    tools = with_tools("coder").own_tools
    renderer = Renderer(renderer_of("coder").tokenizer, None, tools)
    call = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    turns = [f"Hm.\n</think>\n\nSo.\n\n{call}<|im_end|>", "Hm.\n</think>\n\n7<|im_end|>", "Hm.\n</think>\n\n8"]
    response, asked = split_row("Replying", renderer, turns, {"replies": [[RESULT], [SECOND]]})
    calls = [{"type": "function", "id": "call00000", "function": {"name": "add", "arguments": {"a": 1}}}]
    messages = [*PROMPT, said("So.", "Hm.", tool_calls=calls), RESULT, said("7", "Hm."), SECOND]
    expected = [written(renderer, messages[:stop], tools) for stop in (1, 3, 5)]
    assert [list(ids) for ids in asked] == expected
    assert begins(response) == [len(response.token_ids) - len(expected[2]) - len(renderer.tokenizer.encode(turns[2]))]


@pytest.mark.parametrize("template", ["qwen", "keyed", "single", "listed", "fenced"])
def test_a_conversation_that_a_template_keeps_is_one_piece_and_the_same_to_the_bit(template):
    renderer = with_tools(template)
    turns = {
        "qwen": [f"{CALL}<|im_end|>", "6<|im_end|>", "7"],
        "keyed": ["\n<think></think><tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
                  "<|observation|>", "\n<think></think>6<|user|>", "7"],
        "single": ['{"name": "add", "parameters": {"a": 1}}<|eot_id|>', "6<|eot_id|>", "7"],
        "listed": ['[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]</s>', " 6</s>", "7"],
        "fenced": ['<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```'
                   "<｜tool▁call▁end｜><｜tool▁calls▁end｜></s>", "6"],
    }[template]  # fmt: skip
    found = [
        split_row("Replying", renderer, turns, {"replies": [[RESULT], [FIRST]][: len(turns) - 1]}, on_fork=on_fork)
        for on_fork in ("keep", "split")
    ]
    text = renderer.tokenizer.decode_all(found[0][0].token_ids)
    assert not begins(found[1][0]), text
    assert found[0] == found[1] and found[0][0].outcome.reward == 1.0


@pytest.mark.parametrize(
    "template",
    ["llama2", "metaspace_always", "gpt2_space", "harmony", "unigram", "listed", "channels", "deepseek"],
)
def test_pieces_begin_as_prompts_do_in_any_tokenizer(template):
    """Turns here lack the template's space or mark, or have a thought that it drops."""
    renderer = renderer_of(template)
    thinks = template == "deepseek"
    turn = f"{'Hm.</think>' if thinks else ''}6{renderer.end_of_turn.text}"
    response, asked = split_row("Replying", renderer, [turn, "7"], {"replies": [[FIRST]]})
    assert len(begins(response)) == 1 and response.outcome.reward == 1.0
    assert list(asked[1]) == written(renderer, [*PROMPT, said("6", "Hm." if thinks else ""), FIRST])


def test_replies_that_the_template_leaves_out_end_the_row_as_without_pieces():
    template = renderer_of("qwen3").tokenizer.raw.chat_template.replace("m.role == 'tool'", "m.role == 'none'")
    renderer = Renderer(renderer_of("qwen3").tokenizer.with_template(template))
    response, _ = split_row("Replying", renderer, ["6 <|im_end|>", "7"], {"replies": [[RESULT]]})
    assert response.outcome.verdict is Verdict.MALFORMED
    assert "doesn't write messages of the roles tool" in response.outcome.error


def test_a_turn_that_the_template_would_write_otherwise_begins_a_piece():
    """As its space, which what is read of a turn lacks, or a call that can't be read."""
    renderer = with_tools("qwen")
    for turn in ("6 <|im_end|>", f"{CALL.replace(', ', ',')}<|im_end|>"):
        response, _ = split_row("Replying", renderer, [turn, "7"], {"replies": [[FIRST]]})
        assert len(begins(response)) == 1
    unread = "<tool_call>\n{a}\n</tool_call>"
    response, asked = split_row("Replying", renderer, [f"{unread}<|im_end|>", "7"], {"replies": [[FIRST]]})
    assert not begins(response), "as it is"
    assert list(asked[1]) == written(renderer, [*PROMPT, said(unread), FIRST], renderer.own_tools)


def test_a_piece_begins_with_the_openings_text_or_the_answer_that_the_prompt_begins():
    renderer = Renderer(renderer_of("qwen3").tokenizer, None, [], has_openings=True)
    turns, mark = [f"{THINKING}6<|im_end|>", "7"], renderer.tokenizer.encode("<|im_end|>")[0]
    columns = {"replies": [[FIRST]], "opening": " Guess <|im_end|>."}
    _, asked = split_row("Opened", renderer, turns, columns)
    prompt = {"role": "user", "content": "How much? Guess <|im_end|>."}
    expected = renderer.rendered([prompt, said("6", "Hm."), FIRST], {}, add_generation_prompt=True)
    assert renderer.tokenizer.decode_all(asked[1]) == expected
    assert asked[1].count(mark) == 3, "of three messages, and letters in the opening"
    begun = [*PROMPT, {"role": "assistant", "content": "It is"}]
    _, asked = split_row("Replying", "qwen3", [" 6 <|im_end|>", "7"], {"replies": [[FIRST]]}, begun)
    assert list(asked[1]) == written(renderer_of("qwen3"), [*PROMPT, said("It is6"), FIRST])


def test_text_that_an_environment_answers_with_continues_the_piece():
    response, _ = split_row("Answering", "qwen3", [f"{THINKING}6<|im_end|>", "7", "8"], {})
    assert not begins(response) and max(response.turns) == 3


def test_what_a_piece_reads_counts_towards_the_rows_tokens():
    turns, columns = [f"{THINKING}6<|im_end|>", "7"], {"replies": [[FIRST]]}
    whole, asked = split_row("Replying", "qwen3", turns, columns)
    most = len(whole.token_ids) - 1
    assert most > len(asked[1]) + 1
    response, _ = split_row("Replying", "qwen3", turns, columns, max_tokens=most)
    assert response.finish == "length" and set(response.turns) == {1}


def test_recorded_answers_make_the_same_pieces(tmp_path):
    def ended() -> tuple:
        journal = Journal(tmp_path, 0, 0, list)
        with activity.in_stage("generation", 1):
            return split_row("Replying", "qwen3", [f"{THINKING}6<|im_end|>", "7"], columns, journal=journal)

    columns: dict[str, Any] = {"replies": [[FIRST]]}
    first = ended()
    (path,) = (tmp_path / "environment").iterdir()
    # The recorded answer stands: nothing is asked again.
    path.write_text(path.read_text().replace("so?", "hm?"))
    response, asked = ended()
    assert begins(response) == begins(first[0]) != [] and "hm?" in renderer_of("qwen3").tokenizer.decode_all(asked[1])


def test_the_experts_of_a_piece_stay_with_its_tokens():
    turns, num_choices = [f"{THINKING}6<|im_end|>", "7<|im_end|>", "8"], 3
    response, asked = split_row("Replying", "qwen3", turns, {"replies": [[FIRST], [SECOND]]}, choices=num_choices)
    batch = columns_of([response])
    batch.put_lists("prompt_ids", [asked[0]], torch.int32)
    rows = token_rows(batch, SPARSE)
    assert ROUTED_EXPERTS in batch and TURNS in batch and len(rows) == 2
    experts = rows.experts_TLC[:, 0, 0].clone()
    # The last token of a piece is fed nowhere.
    ends = rows.offsets[1:] - 1
    assert experts[ends].tolist() == [-1, -1]
    experts[ends] = rows.tokens_T[ends].short()
    assert experts.tolist() == rows.tokens_T.tolist()


def test_a_program_that_compacts_its_history_has_a_piece_per_conversation():
    pytest.importorskip("aiohttp")
    from tests.dataflow.stages.rollout.test_programs import config_of, own, user

    renderer, asked = own("qwen"), []
    turns = ["1 <|im_end|>", "2<|im_end|>", "3<|im_end|>"]
    response, _ = ended_row(config_of("compacting", on_fork="split"), renderer, "", turns, asked=asked)
    conversations = [
        [user("one")], [user("one"), said("1"), user("two")], [user("so far: 2"), said("2"), user("three")],
    ]  # fmt: skip
    first, *later = [written(renderer, one) for one in conversations]
    # The first turn's space makes the second request another one than what was written.
    assert [list(ids) for ids in asked] == [first, *later] and len(begins(response)) == 2
    assert response.outcome.reward == 3.0
    kept, _ = ended_row(config_of("compacting"), renderer, "", turns)
    assert kept.outcome.verdict is Verdict.MALFORMED and "environment.on_fork: split" in kept.outcome.error


def test_a_program_that_forks_without_a_question_ends_its_row():
    pytest.importorskip("aiohttp")
    from tests.dataflow.stages.rollout.test_programs import config_of, own

    config = config_of("going_on", on_fork="split")
    response, _ = ended_row(config, own("qwen"), "adds nothing", ["x<|im_end|>", "y"])
    assert response.outcome.verdict is Verdict.MALFORMED
    assert "the last message has the role 'assistant'" in response.outcome.error
