"""The samples of the page's viewer: evenly spread steps, as many as fit into its share of the file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2.utils import htmlsafe_json_dumps

from spmdrl.observability.jsonl import number
from spmdrl.observability.report.page import JSON_FORMAT, Parts, Samples

MAX_BYTES = 1_800_000
MAX_CHARACTERS = 3000
MAX_TOKENS = 500
MAX_TURNS = 100
INTEGERS = ("step", "row", "version")
NUMBERS = ("reward", "advantage", "mismatch")
TEXTS = ("prompt", "response", "answer", "verdict")


def sample_viewer(records: Sequence[Mapping[str, Any]]) -> Parts:
    samples = [_shown(record) for record in records if isinstance(record.get("step"), int)]
    kept = fitting(samples, MAX_BYTES)
    num_steps, num_kept = (len({one["step"] for one in some}) for some in (samples, kept))
    note = (
        f"{len(kept)} of {len(samples)} samples, of {num_kept} of {num_steps} steps, to keep this file small; "
        "samples.jsonl has all."
    )
    return [Samples(kept, note if len(kept) < len(samples) else "")] if kept else []


def fitting(samples: Sequence[Mapping[str, Any]], max_bytes: int) -> list[Mapping[str, Any]]:
    """Return samples of evenly spread steps, the last included, whose JSON takes at most `max_bytes`.

    If a single step takes more, returns its first samples.
    """
    sizes = [len(htmlsafe_json_dumps(sample, **JSON_FORMAT)) + 1 for sample in samples]
    size_of: dict[int, int] = {}
    for sample, size in zip(samples, sizes, strict=True):
        size_of[sample["step"]] = size_of.get(sample["step"], 0) + size
    steps = sorted(size_of)
    stride = 1
    while _size(chosen := steps[::-1][::stride], size_of) > max_bytes and len(chosen) > 1:
        stride += 1 + stride // 8
    kept, room = [], max_bytes
    for sample, size in zip(samples, sizes, strict=True):
        if sample["step"] in chosen and (room := room - size) >= 0:
            kept.append(sample)
    return kept


def _size(steps: Iterable[int], size_of: Mapping[int, int]) -> int:
    return sum(size_of[step] for step in steps)


def _shown(record: Mapping[str, Any]) -> dict[str, Any]:
    parts = record.get("parts")
    shown: dict[str, Any] = {name: record.get(name) if isinstance(record.get(name), int) else None for name in INTEGERS}
    shown |= {name: _short(record.get(name)) for name in TEXTS}
    shown |= {name: _digits(record.get(name)) for name in NUMBERS}
    shown["tokens"] = _tokens(record.get("tokens"))
    if isinstance(turns := record.get("turns"), list):
        pairs = [turn for turn in turns[:MAX_TURNS] if isinstance(turn, list) and len(turn) == 2]
        shown["turns"] = [[_short(text) for text in turn] for turn in pairs]
    shown["parts"] = {str(name): _digits(value) for name, value in parts.items()} if isinstance(parts, dict) else {}
    return shown


def _tokens(tokens: object) -> list[list[Any]]:
    """Return the first tokens as [text, advantage, mismatch]; anything else is left out."""
    known = tokens if isinstance(tokens, list) else []
    triples = [token for token in known[:MAX_TOKENS] if isinstance(token, list) and len(token) == 3]
    return [[_short(text), _digits(advantage), _digits(mismatch)] for text, advantage, mismatch in triples]


def _short(value: object) -> str:
    text = "" if value is None else str(value)
    if len(text) <= MAX_CHARACTERS:
        return text
    head, tail = text[: MAX_CHARACTERS * 2 // 3], text[-MAX_CHARACTERS // 3 :]
    return f"{head}\n[... {len(text) - len(head) - len(tail)} characters left out ...]\n{tail}"


def _digits(value: object) -> float | None:
    known = number(value)
    return None if known is None or not math.isfinite(known) else float(f"{known:.4g}")
