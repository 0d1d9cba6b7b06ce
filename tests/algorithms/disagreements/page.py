"""The record of all comparisons, which `spmdrl explain` reads, and their table in docs/algorithms.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypedDict

from tests.support.jobs import ROOT

RECORD = ROOT / "src" / "spmdrl" / "algorithms" / "comparisons.json"
PAGE = ROOT / "docs" / "algorithms.md"
_BEGIN, _END = "<!-- comparisons: written by launch/disagreements.sh -->\n", "<!-- end of comparisons -->\n"


class Found(TypedDict):
    versions: Mapping[str, str]
    rows: list[dict[str, str]]


def with_table(page: str, found: Found) -> str:
    """The page with the table of what was found in its place."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return before + _BEGIN + "\n".join(_lines(found)) + "\n" + _END + after


def _lines(found: Found) -> Iterator[str]:
    yield "Compared with " + ", ".join(f"{peer} {version}" for peer, version in found["versions"].items()) + "."
    yield ""
    yield "| `algo.name` | what, with our keys | other trainer's function | result |"
    yield "|---|---|---|---|"
    for row in found["rows"]:
        keys = f" with `{row['keys']}`" if row["keys"] else ""
        result = f"differs: {row['why']}" if row["why"] else "equal"
        yield f"| {row['algorithm']} | {row['part']}{keys} | {row['peer']}: {row['function']} | {result} |"
