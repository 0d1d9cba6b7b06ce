"""Look-up of a row's prompt, answer and completion under the names that data sets use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import Any

from spmdrl.dataflow.data.formats import Flaw
from spmdrl.engines.models.renderer import Answer

PROMPT_KEYS = ("prompt", "question", "problem", "messages", "instruction", "input")
ANSWER_KEYS = (
    "answer", "expected_answer", "final_answer", "ground_truth", "solution", "label", "reward_model.ground_truth",
    "reward_spec.ground_truth",
)  # fmt: skip
COMPLETION_KEYS = ("completion", "output", "response")

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Column:
    """A column's name and value; both None if nothing was found."""

    key: str | None = None
    value: Any = None


@dataclass(frozen=True)
class FoundColumns:
    """Parts of a row: messages with plain texts, without the last assistant message if it is the completion."""

    prompt: Column
    answer: Column
    completion: Column
    rejected: Column = Column()
    """worse response of a pair, whose better one is the completion"""


def find_columns(values: Mapping[str, Any], prompt_key: str | None, answer_key: str | None) -> FoundColumns:
    """Look up the parts of a row. Raises Flaw for messages with anything but text."""
    prompt = look_up(values, (prompt_key,) if prompt_key else PROMPT_KEYS)
    answer = look_up(values, (answer_key,) if answer_key else ANSWER_KEYS)
    completion = _completion(look_up(values, COMPLETION_KEYS))
    extra = values.get("input")
    if prompt.key == "instruction" and isinstance(prompt.value, str) and isinstance(extra, str) and extra.strip():
        prompt = Column(prompt.key, f"{prompt.value}\n\n{extra}")
    if isinstance(prompt.value, list):
        messages = plain_messages(prompt.key, prompt.value)
        # A prompt may end with the start of an answer; a conversation ends with the answer.
        if prompt.key != "prompt" and is_answered(messages):
            completion = completion if completion.key else Column(prompt.key, answer_of(messages))
            messages = messages[:-1]
        prompt = Column(prompt.key, messages)
    return FoundColumns(prompt, answer, completion)


def plain_messages(key: str | None, messages: list[Any]) -> list[Any]:
    """Return the messages with content parts joined to one text. Raises Flaw for a part that is no text."""
    return [_plain_message(f"{key}[{number}]", message) for number, message in enumerate(messages)]


def _plain_message(name: str, message: Any) -> Any:
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
        return message
    texts = []
    for number, part in enumerate(message["content"]):
        text = part.get("text") if isinstance(part, Mapping) else part
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind != "text" or not isinstance(text, str):
            what = f"'{name}.content[{number}]' is of type {kind!r}"
            raise Flaw("not_text", f"{what}, but only texts are read; leave it out")
        texts.append(text)
    return {**message, "content": "".join(texts)}


def is_answered(messages: list[Any]) -> bool:
    """Return True if the last message is an answer of the assistant."""
    last = messages[-1] if messages else None
    return isinstance(last, Mapping) and last.get("role") == "assistant" and _is_whole(last)


def _is_whole(message: Mapping[str, Any]) -> bool:
    """Return True if a message has a text or, of the assistant, tool calls."""
    has_calls = message.get("role") == "assistant" and bool(message.get("tool_calls"))
    return isinstance(message.get("content"), str) or (has_calls and message.get("content") is None)


def answer_of(messages: list[Any]) -> str | dict[str, Any]:
    """Return the last message's answer: its text, or the message if it has more or follows another answer."""
    *before, last = messages
    is_text = not any(value for key, value in last.items() if key not in ("role", "content"))
    is_text = is_text and not (before and isinstance(before[-1], Mapping) and before[-1].get("role") == "assistant")
    return last["content"] if is_text else last


def is_empty(answer: Any) -> bool:
    """Return True if an answer has neither text nor tool calls."""
    if isinstance(answer, Mapping):
        return not (answer.get("tool_calls") or str(answer.get("content") or "").strip())
    return not str(answer).strip()


def _completion(column: Column) -> Column:
    """Return a completion given as one assistant message: its text, or the message if it has more."""
    if isinstance(column.value, list) and len(column.value) == 1:
        messages = plain_messages(column.key, column.value)
        if is_answered(messages):
            return Column(column.key, answer_of(messages))
    return column


def check_prompt(prompt: Column) -> None:
    """Raise Flaw unless the prompt is text or a list of messages, and not empty."""
    if isinstance(prompt.value, str):
        if not prompt.value.strip():
            raise Flaw("empty_prompt", f"'{prompt.key}' is empty")
        return
    if not isinstance(prompt.value, list):
        kind = type(prompt.value).__name__
        raise Flaw("prompt_type", f"'{prompt.key}' is a {kind}, but must be text or a list of messages")
    if not prompt.value:
        raise Flaw("empty_prompt", f"'{prompt.key}' is an empty list of messages before the answer")
    for number, message in enumerate(prompt.value):
        fields = message if isinstance(message, Mapping) else {}
        if not isinstance(fields.get("role"), str) or not _is_whole(fields):
            name = f"{prompt.key}[{number}]"
            raise Flaw("bad_message", f"'{name}' must be an object with the texts 'role' and 'content'")


def look_up(values: Mapping[str, Any], keys: tuple[str, ...]) -> Column:
    """Return the first of the dotted keys that holds something, with its value."""
    for key in keys:
        value: Any = values
        if key in values:
            value = values[key]
        else:
            for name in key.split("."):
                value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            return Column(key, value)
    return Column()


CHOSEN, REJECTED = "chosen", "rejected"
# As Anthropic's hh-rlhf has it.
_TURN = "\n\nAssistant:"


def find_pair(
    values: Mapping[str, Any], found: FoundColumns, margin_key: str | None, *, is_prompt_named: bool
) -> FoundColumns:
    """Return the columns with the row's pair. Raises Flaw if it has none that can be learnt.

    If both columns hold a conversation, the prompt is everything before the response; if they are texts, there is no
    prompt and not `is_prompt_named`, it is their common beginning. `margin_key` holds a number.
    """
    if margin_key is not None:
        _check_margin(values.get(margin_key), margin_key)
    texts: list[Any] = [values.get(key) for key in (CHOSEN, REJECTED)]
    if found.prompt.key is None and not is_prompt_named and all(isinstance(text, str) and text for text in texts):
        size = _prompt_size(*texts)
        found = replace(found, prompt=Column(CHOSEN, texts[0][:size]))
        values = {**values, CHOSEN: texts[0][size:], REJECTED: texts[1][size:]}
    (chosen, before), (rejected, other) = (_response(values, key) for key in (CHOSEN, REJECTED))
    if before != other:
        raise Flaw("other_prompt", f"'{CHOSEN}' and '{REJECTED}' answer different messages, but a pair has one prompt")
    if chosen == rejected:
        raise Flaw("equal_pair", f"'{CHOSEN}' and '{REJECTED}' are the same, so there is nothing to prefer")
    prompt = Column(CHOSEN, before) if before else found.prompt
    return replace(found, prompt=prompt, completion=Column(CHOSEN, chosen), rejected=Column(REJECTED, rejected))


def _prompt_size(chosen: str, rejected: str) -> int:
    """Return the length of the common beginning that is the prompt: through the last turn's mark, else whole words."""
    if chosen == rejected:
        raise Flaw("equal_pair", f"'{CHOSEN}' and '{REJECTED}' are the same, so there is nothing to prefer")
    common = commonprefix([chosen, rejected])
    if (turn := common.rfind(_TURN)) >= 0:
        return turn + len(_TURN)
    size = max((place for place, letter in enumerate(common) if letter.isspace()), default=0)
    if not common[:size].strip():
        raise Flaw(
            "no_prompt",
            f"no prompt, and '{CHOSEN}' and '{REJECTED}' have no common beginning that could be one; put it into a "
            "column 'prompt' of the row",
        )
    return size


def _response(values: Mapping[str, Any], key: str) -> tuple[Answer, list[Any]]:
    """Return a response, with the messages before it if the column holds a conversation."""
    value = values.get(key)
    if value is None:
        raise Flaw("no_pair", f"no '{key}'; rows of pairs have a prompt, '{CHOSEN}' and '{REJECTED}'")
    before: list[Any] = []
    if isinstance(value, list):
        messages = plain_messages(key, value)
        if not is_answered(messages):
            raise Flaw("pair_type", f"'{key}' is a list that doesn't end with a message of the assistant")
        before, value = messages[:-1], answer_of(messages)
    elif not isinstance(value, str):
        kind = type(value).__name__
        raise Flaw("pair_type", f"'{key}' is a {kind}, but must be text, or messages that end with the assistant's")
    if is_empty(value):
        raise Flaw("empty_response", f"'{key}' is empty")
    return value, before


def _check_margin(value: Any, key: str) -> None:
    try:
        is_number = not isinstance(value, bool) and math.isfinite(float(value))
    except (TypeError, ValueError):
        is_number = False
    if not is_number:
        raise Flaw("no_margin", f"'{key}' is {value!r}, but a margin must be a finite number")
