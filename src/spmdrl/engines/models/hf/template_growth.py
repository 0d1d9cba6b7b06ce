"""The limit on how much longer a text may become in a chat template."""

import json
from typing import Any

MOST_GROWTH = 64


def check_growth(rendered: str, template: str, messages: Any, tools: Any) -> None:
    """Raise ValueError for a text that is far longer than its messages, tools and the template can fill."""
    if len(rendered) > 4096:
        given = len(json.dumps([messages, tools], default=str)) + len(template) * (1 + len(messages))
        if len(rendered) > MOST_GROWTH * given:
            raise ValueError(f"it renders {len(rendered)} characters of {given} of messages and template")
