"""Conversations as tokens, of which those that the assistant wrote, in every turn, are marked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmdrl.engines.models.tokenizer import ModelTokenizer

Messages = Sequence[Mapping[str, Any]]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class MarkedTokens:
    """Token ids, and for each whether it is to be learnt."""

    ids: list[int]
    is_learnt: list[bool]

    @classmethod
    def of_answer(cls, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> MarkedTokens:
        """A prompt and the one answer to it."""
        return cls([*prompt_ids, *answer_ids], [False] * len(prompt_ids) + [True] * len(answer_ids))


def marked_conversation(messages: Messages, tokenizer: ModelTokenizer) -> MarkedTokens:
    """The conversation in the chat template, with what the assistant wrote marked.

    By the template's own mark, `{% generation %}`, where it has one. Else by the prefixes of the conversation that end
    before and after each of the assistant's messages: marked is what lies between, up to the token that ends the turn.
    Raises ValueError where that isn't unambiguous, or the first token would be learnt.
    """
    if _GENERATION.search(tokenizer.raw.get_chat_template()):
        rendered = _in_template(messages, tokenizer, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        marked = MarkedTokens(list(rendered["input_ids"]), [mask == 1 for mask in rendered["assistant_masks"]])
    else:
        marked = _by_prefixes(messages, tokenizer)
    if not any(marked.is_learnt):
        raise ValueError("the chat template marks no token as the assistant's, so there is nothing to learn")
    if marked.is_learnt[0]:
        raise ValueError("the first token is the assistant's, which no token precedes; begin with a user's message")
    return marked


def _by_prefixes(messages: Messages, tokenizer: ModelTokenizer) -> MarkedTokens:
    ids, end = _rendered(messages, tokenizer, has_prompt=False), tokenizer.end_of_turn()
    ends = {*tokenizer.stop_token_ids, *([end.token_id] if end else [])}
    is_learnt = [False] * len(ids)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if number == 0:
            raise ValueError("the first message is the assistant's; begin with a user's message")
        before = _rendered(messages[:number], tokenizer, has_prompt=True)
        through = _rendered(messages[: number + 1], tokenizer, has_prompt=False)
        if not len(before) < len(through) or ids[: len(before)] != before or ids[: len(through)] != through:
            raise ValueError(
                f"the chat template writes messages[{number}] or what precedes it otherwise in the whole conversation "
                "than where it ends there, so what the assistant wrote is ambiguous; mark it by {% generation %} in "
                "the template, or set sft.turns to last"
            )
        stop = next((place for place in range(len(before), len(through)) if ids[place] in ends), len(through) - 1)
        is_learnt[len(before) : stop + 1] = [True] * (stop + 1 - len(before))
    return MarkedTokens(ids, is_learnt)


def _rendered(messages: Messages, tokenizer: ModelTokenizer, *, has_prompt: bool) -> list[int]:
    """The tokens of messages in the template, `has_prompt` with the beginning of the assistant's next one."""
    return tokenizer.encode(_in_template(messages, tokenizer, tokenize=False, add_generation_prompt=has_prompt))


def _in_template(messages: Messages, tokenizer: ModelTokenizer, **how: Any) -> Any:
    try:
        return tokenizer.raw.apply_chat_template(list(messages), **how)
    except Exception as problem:
        # Templates may raise anything of their own, such as a demand for alternating roles.
        what = f"the chat template doesn't take its first {len(messages)} messages"
        raise ValueError(f"{what} ({type(problem).__name__}: {problem}); mend them, or set sft.turns to last") from None
