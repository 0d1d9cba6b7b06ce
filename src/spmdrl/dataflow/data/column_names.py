"""Look-up of a row's prompt, answer and completion under the names that data sets use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spmdrl.dataflow.data.formats import Flaw

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
