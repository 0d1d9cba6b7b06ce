"""What the pages in docs that list names are made of, from the code itself."""

from __future__ import annotations

from collections.abc import Iterator

from spmdrl.aliases import ALIASES


def alias_table() -> Iterator[str]:
    """The lines of the Markdown table of all aliases."""
    yield "| name | known from | what it means there | what it sets here |"
    yield "|---|---|---|---|"
    for name, alias in sorted(ALIASES.items()):
        here = f"`{alias.key}`" + (f": {alias.here}" if alias.here else "")
        yield f"| `{name}` | {alias.origin} | {alias.there} | {here} |"
