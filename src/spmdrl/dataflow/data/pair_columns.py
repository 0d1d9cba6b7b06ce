"""Pairs of responses in data rows: `chosen` is preferred to `rejected`, as texts or as messages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import Any

from spmdrl.dataflow.data.column_names import Column, FoundColumns, answer_of, is_answered, is_empty, plain_messages
from spmdrl.dataflow.data.formats import Flaw
from spmdrl.engines.models.renderer import Answer

CHOSEN, REJECTED = "chosen", "rejected"
# As Anthropic's hh-rlhf has it.
_TURN = "\n\nAssistant:"


@dataclass(frozen=True)
class _Response:
    """A response, with the messages before it if the column holds a conversation."""

    answer: Answer
    before: list[Any]


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
    chosen, rejected = (_response(values, key) for key in (CHOSEN, REJECTED))
    if chosen.before != rejected.before:
        raise Flaw("other_prompt", f"'{CHOSEN}' and '{REJECTED}' answer different messages, but a pair has one prompt")
    if chosen.answer == rejected.answer:
        raise Flaw("equal_pair", f"'{CHOSEN}' and '{REJECTED}' are the same, so there is nothing to prefer")
    prompt = Column(CHOSEN, chosen.before) if chosen.before else found.prompt
    return replace(
        found, prompt=prompt, completion=Column(CHOSEN, chosen.answer), rejected=Column(REJECTED, rejected.answer)
    )


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


def _response(values: Mapping[str, Any], key: str) -> _Response:
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
    return _Response(value, before)


def _check_margin(value: Any, key: str) -> None:
    try:
        is_number = not isinstance(value, bool) and math.isfinite(float(value))
    except (TypeError, ValueError):
        is_number = False
    if not is_number:
        raise Flaw("no_margin", f"'{key}' is {value!r}, but a margin must be a finite number")
