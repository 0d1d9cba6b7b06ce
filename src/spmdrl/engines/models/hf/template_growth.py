"""The limit on how much longer a text may become in a chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

MOST_GROWTH = 64
_UNMEASURED_CHARACTERS = 4096


def check_growth(rendered: str, template: str, messages: Sequence[Mapping[str, Any]], *others: object) -> None:
    """Raise ValueError for a text that is far longer than its messages, `others` (tools) and the template can fill."""
    if len(rendered) <= _UNMEASURED_CHARACTERS:
        return
    given = len(json.dumps([messages, *others], default=str)) + len(template) * (1 + len(messages))
    if len(rendered) > MOST_GROWTH * given:
        raise ValueError(
            f"renders {len(rendered)} characters of {given} of messages and template; the most is {MOST_GROWTH} times"
        )
