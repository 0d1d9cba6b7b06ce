"""Pairs of responses in data rows: `chosen` is preferred to `rejected`, as texts or as messages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from spmdrl.dataflow.data.column_names import Column, FoundColumns, is_answered, plain_messages
from spmdrl.dataflow.data.formats import Flaw

CHOSEN, REJECTED = "chosen", "rejected"


@dataclass(frozen=True)
class _Response:
    """A response's text, and the messages before it where the column holds a conversation."""

    text: str
    before: list[Any]


def find_pair(values: Mapping[str, Any], found: FoundColumns, margin_key: str | None) -> FoundColumns:
    """The columns with the row's pair. Raises Flaw where there is none that can be learnt.

    Where both columns hold a conversation, it is the prompt up to the response. `margin_key` holds a number.
    """
    if margin_key is not None:
        _check_margin(values.get(margin_key), margin_key)
    chosen, rejected = (_response(values, key) for key in (CHOSEN, REJECTED))
    if chosen.before != rejected.before:
        raise Flaw("other_prompt", f"'{CHOSEN}' and '{REJECTED}' answer different messages, but a pair has one prompt")
    if chosen.text == rejected.text:
        raise Flaw("equal_pair", f"'{CHOSEN}' and '{REJECTED}' are the same, so there is nothing to prefer")
    prompt = Column(CHOSEN, chosen.before) if chosen.before else found.prompt
    return replace(
        found, prompt=prompt, completion=Column(CHOSEN, chosen.text), rejected=Column(REJECTED, rejected.text)
    )


def _response(values: Mapping[str, Any], key: str) -> _Response:
    value = values.get(key)
    if value is None:
        raise Flaw("no_pair", f"no '{key}'; rows of pairs have a prompt, '{CHOSEN}' and '{REJECTED}'")
    before: list[Any] = []
    if isinstance(value, list):
        messages = plain_messages(key, value)
        if not is_answered(messages):
            raise Flaw("pair_type", f"'{key}' is a list that doesn't end with a message of the assistant")
        *before, last = messages
        value = last["content"]
    if not isinstance(value, str):
        kind = type(value).__name__
        raise Flaw("pair_type", f"'{key}' is a {kind}, but must be text, or messages that end with the assistant's")
    if not value.strip():
        raise Flaw("empty_response", f"'{key}' is empty")
    return _Response(value, before)


def _check_margin(value: Any, key: str) -> None:
    try:
        is_number = not isinstance(value, bool) and math.isfinite(float(value))
    except (TypeError, ValueError):
        is_number = False
    if not is_number:
        raise Flaw("no_margin", f"'{key}' is {value!r}, but a margin must be a finite number")
