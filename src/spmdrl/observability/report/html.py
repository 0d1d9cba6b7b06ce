"""Pieces of HTML with everything escaped, and JSON that no text can break out of."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

NUM_COLORS = 10
STEPS = (
    '<span id="zoom" hidden title="Draw over a chart to choose its steps; a double click or Escape shows all again.">'
    '<label>steps <input id="zoom-from" type="number"></label> <label>to <input id="zoom-to" type="number"></label> '
    '<button type="button" id="zoom-reset">all</button></span>'
)


def escape(value: object) -> str:
    """Text for HTML content and quoted attributes."""
    return html.escape(str(value), quote=True)


def color_class(index: int) -> str:
    return f"k{index % NUM_COLORS}"


def embedded_json(value: Any) -> str:
    """JSON for a script element of type application/json: holds no `<`, `>` or `&`, whatever the text in it says."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def section(anchor: str, title: str, *bodies: str) -> str:
    """A titled part of the page, or nothing where it would be empty."""
    content = "\n".join(body for body in bodies if body)
    return f'<section id="{anchor}"><h2>{escape(title)}</h2>\n{content}\n</section>' if content else ""


def contents(sections: Sequence[str]) -> str:
    """Links to the sections that are there, and a box that makes the page load itself again every 10 seconds."""
    found = [match for text in sections if (match := re.match(r'<section id="(\w+)"><h2>(.*?)</h2>', text))]
    links = "".join(f'<a href="#{match[1]}">{match[2]}</a>' for match in found)
    return f'<nav>{links}{STEPS}<label><input type="checkbox" id="live"> live</label></nav>'


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return ""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def legend(entries: Iterable[tuple[int, str]]) -> str:
    """Names with the colors of these indexes."""
    items = (f'<span class="key {color_class(index)}"><i></i>{escape(label)}</span>' for index, label in entries)
    return f'<div class="legend">{"".join(items)}</div>'


def choices(name: str, views: Sequence[tuple[str, str]]) -> str:
    """Views of which one is shown at a time, picked by buttons above them."""
    buttons = "".join(
        f'<button type="button" data-view="{index}"{" class=on" if index == 0 else ""}>{escape(title)}</button>'
        for index, (title, _) in enumerate(views)
    )
    panes = "".join(
        f'<div class="pane" data-pane="{index}"{" hidden" if index else ""}>{body}</div>'
        for index, (_, body) in enumerate(views)
    )
    return f'<div class="choices" data-choices="{escape(name)}"><div class="buttons">{buttons}</div>{panes}</div>'


def value_text(value: float) -> str:
    """A value in four significant digits."""
    return f"{value:.4g}" if math.isfinite(value) else str(value)
