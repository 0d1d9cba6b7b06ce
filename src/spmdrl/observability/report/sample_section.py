"""The page's samples: those of training and, of evaluations, the same prompts' answers after each of them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spmdrl.observability.jsonl import number, objects_of, read_jsonl
from spmdrl.observability.log import SAMPLES_FILE
from spmdrl.observability.report.page import Parts, Samples, script_json

MAX_BYTES = 1_500_000
MAX_HELD_OUT_BYTES = 300_000
MAX_CHARACTERS = 3000
MAX_TOKENS = 500
MAX_TURNS = 100
REPEATED = 4
"""length of the sequences of tokens, or words, that are counted as repeated"""
INTEGERS = ("step", "row", "version")
NUMBERS = ("reward", "advantage", "mismatch")
TEXTS = ("prompt", "response", "answer", "verdict")
_STEP = b'"step": '
_MOST_SHOWN = 40_000
"""bytes that a sample takes at most, roughly, as its texts are cut"""


def sample_viewer(run_dir: Path) -> Parts:
    """Return the viewer of as many of a run's samples as fit."""
    places = _places(run_dir / SAMPLES_FILE)
    size_of = {step: sum(min(length, _MOST_SHOWN) for _, length in lines) for step, lines in places.items()}
    # Evenly spread steps, the last included, in the order of the file.
    chosen = sorted(place for step in spread_steps(size_of, MAX_BYTES) for place in places[step])
    trained = fitting([_shown(record) for record in _read(run_dir / SAMPLES_FILE, chosen)], MAX_BYTES)
    held_out = _held_out(run_dir)
    if not trained and not held_out:
        return []
    num_samples, num_steps = sum(map(len, places.values())), len({one["step"] for one in trained})
    note = (
        f"{len(trained)} of {num_samples} samples, of {num_steps} of {len(places)} steps, to keep this file small; "
        "samples.jsonl has all."
    )
    return [Samples([*trained, *held_out], note if len(trained) < num_samples else "")]


def _places(path: Path) -> dict[int, list[tuple[int, int]]]:
    """Return offset and length of the lines of each step; to parse all of them would take seconds."""
    found: dict[int, list[tuple[int, int]]] = {}
    offset = 0
    if path.is_file():
        with path.open("rb") as file:
            for line in file:
                # Its last occurrence, as a part of the reward may have the same name.
                start = line.rfind(_STEP) + len(_STEP)
                digits = line[start : start + 20].partition(b",")[0].strip(b"} \n")
                if start >= len(_STEP) and digits.isdigit():
                    found.setdefault(int(digits), []).append((offset, len(line)))
                offset += len(line)
    return found


def spread_steps(size_of: Mapping[int, int], max_bytes: int) -> list[int]:
    """Return evenly spread steps, the last included, that together take at most `max_bytes`, or a single one."""
    steps = sorted(size_of, reverse=True)
    stride = 1
    while sum(map(size_of.__getitem__, chosen := steps[::stride])) > max_bytes and len(chosen) > 1:
        stride += 1 + stride // 8
    return chosen


def _read(path: Path, places: Sequence[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    if not places:
        return
    with path.open("rb") as file:
        for offset, length in places:
            file.seek(offset)
            yield from objects_of([file.read(length).decode("utf-8", "replace")])


def fitting(samples: Sequence[Mapping[str, Any]], max_bytes: int) -> list[Mapping[str, Any]]:
    """Return samples of evenly spread steps, the last included, whose JSON takes at most `max_bytes`.

    If a single step takes more, returns its first samples.
    """
    sizes = [len(script_json(sample)) + 1 for sample in samples]
    size_of: Counter[int] = Counter()
    for sample, size in zip(samples, sizes, strict=True):
        size_of[sample["step"]] += size
    chosen = spread_steps(size_of, max_bytes)
    kept, room = [], max_bytes
    for sample, size in zip(samples, sizes, strict=True):
        if sample["step"] in chosen and (room := room - size) >= 0:
            kept.append(sample)
    return kept


def _held_out(run_dir: Path) -> list[Mapping[str, Any]]:
    """Return the answers to the first held-out prompts after each evaluation, of as many prompts as fit."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for path in sorted((run_dir / "eval").glob("step_*.jsonl")):
        if (digits := path.stem.removeprefix("step_")).isdigit():
            by_step[int(digits)] = list(read_jsonl(path))
    rows = [record.get("row") for records in by_step.values() for record in records]
    found: list[Mapping[str, Any]] = []
    room = MAX_HELD_OUT_BYTES
    for row in dict.fromkeys(rows):
        of_row = [
            _shown(record | {"step": step, "kind": "held-out"})
            for step, records in by_step.items() for record in records if record.get("row") == row
        ]  # fmt: skip
        room -= len(json.dumps(of_row))
        if room < 0:
            break
        found += of_row
    return found


def _shown(record: Mapping[str, Any]) -> dict[str, Any]:
    parts, tokens = record.get("parts"), record.get("tokens")
    shown: dict[str, Any] = {name: record.get(name) if isinstance(record.get(name), int) else None for name in INTEGERS}
    shown |= {name: _short(record.get(name)) for name in TEXTS}
    shown |= {name: _digits(record.get(name)) for name in NUMBERS}
    shown["kind"] = "held-out" if record.get("kind") == "held-out" else "training"
    shown["tokens"] = _tokens(tokens)
    pieces = (
        [str(token[0]) for token in tokens if isinstance(token, list) and token] if isinstance(tokens, list) else []
    )
    shown["length"] = len(pieces) or _digits(record.get("num_tokens"))
    shown["repeats"] = repeats(pieces or str(record.get("response", "")).split())
    if isinstance(turns := record.get("turns"), list):
        shown["turns"] = [pair for turn in turns[:MAX_TURNS] if len(pair := _pair(turn)) == 2]
    shown["parts"] = {str(name): _digits(value) for name, value in parts.items()} if isinstance(parts, dict) else {}
    return shown


def repeats(pieces: Sequence[str]) -> float:
    """Return the share of sequences of four tokens that stood in the response before."""
    runs = [tuple(pieces[at : at + REPEATED]) for at in range(len(pieces) - REPEATED + 1)]
    return round(1 - len(set(runs)) / len(runs), 3) if runs else 0.0


def _tokens(tokens: object) -> list[list[Any]]:
    """Return the first tokens as [text, advantage, mismatch]; anything else is left out."""
    known = tokens if isinstance(tokens, list) else []
    triples = [token for token in known[:MAX_TOKENS] if isinstance(token, list) and len(token) == 3]
    return [[_short(text), _digits(advantage), _digits(mismatch)] for text, advantage, mismatch in triples]


def _pair(turn: object) -> list[str]:
    """Return the texts of model and environment; an evaluation has them by name."""
    both = [turn.get("response"), turn.get("observation")] if isinstance(turn, dict) else turn
    return [_short(text) for text in both] if isinstance(both, list) else []


def _short(value: object) -> str:
    text = "" if value is None else str(value)
    if len(text) <= MAX_CHARACTERS:
        return text
    head, tail = text[: MAX_CHARACTERS * 2 // 3], text[-MAX_CHARACTERS // 3 :]
    return f"{head}\n[... {len(text) - len(head) - len(tail)} characters left out ...]\n{tail}"


def _digits(value: object) -> float | None:
    known = value if type(value) is float else number(value)
    return None if known is None or not math.isfinite(known) else float(f"{known:.4g}")
