"""Extraction of a text's final answer."""

from __future__ import annotations

import re

_HASHES = re.compile(r"####\s*([^\s#][^\n#]*)")
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|[{}]")
_BETWEEN_JOINED_BOXES = re.compile(r"[\s$,;.]*(?:,|and|or|\\text\{\s*(?:and|or)\s*\})[\s$]*")
_STATEMENT = re.compile(
    r"\b(?:answer|option|choice)s?\b[^.\n:]{0,60}?(?:\bis\b|\bare\b|:)\s*:?[ \t]*(?P<answer>\S[^\n]*)", re.IGNORECASE
)
# A dollar sign opens a formula where a character follows it at once, and closes one after a character and before no
# digit: amounts of money aren't formulas.
_FORMULA = re.compile(
    r"\$\$(?P<display>[^$]+)\$\$|(?<![\\\d$])\$(?P<inline>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?!\d)"
    r"|\\\[(?P<bracket>(?:[^\\]|\\(?!\]))+)\\\]|\\\((?P<parenthesis>(?:[^\\]|\\(?!\)))+)\\\)"
)
_BETWEEN_JOINED_FORMULAS = re.compile(r"\s*(?:,|,?\s*and|,?\s*or)\s*")


def marked_answer(text: str) -> str | None:
    """Return the content of the last `#### x` (to the end of its line) or closed `\\boxed{x}`, whichever is later.

    Boxes with nothing but `and`, `or` or a comma between them are one answer.
    """
    hashes = list(_HASHES.finditer(text))
    start, boxed = _last_boxes(text)
    if hashes and hashes[-1].start() > start:
        # `#### \boxed{18}` marks its answer twice.
        return marked_answer(hashes[-1].group(1)) or hashes[-1].group(1).strip()
    return boxed


def _last_boxes(text: str) -> tuple[int, str | None]:
    """Return the start and content of the last closed box and those joined to it; (-1, None) without one.

    One pass, however deep boxes nest.
    """
    boxes: list[tuple[int, int, str]] = []
    opened: list[re.Match[str]] = []
    for brace in _BRACE.finditer(text):
        if brace.group() != "}":
            opened.append(brace)
        elif opened:
            opening = opened.pop()
            if len(opening.group()) > 1:
                boxes.append((opening.start(), brace.end(), text[opening.end() : brace.start()].strip()))
    if not boxes:
        return -1, None
    boxes.sort()
    first = boxes[-1][0]
    answers = [boxes[-1][2]]
    for start, end, answer in reversed(boxes[:-1]):
        if end > first or not _BETWEEN_JOINED_BOXES.fullmatch(text, end, first):
            break
        first = start
        answers.insert(0, answer)
    return boxes[-1][0], ", ".join(answers)


def stated_answer(text: str) -> str | None:
    """Return the last "the answer is ..." to the end of its sentence: its formulas, or else its words."""
    statements = list(_STATEMENT.finditer(text))
    if not statements:
        return None
    answer = re.split(r"\.(?:\s|$)", statements[-1].group("answer"), maxsplit=1)[0].strip()
    formula, _ = last_formula(answer)
    return formula or answer.strip(" *_\"'") or None


def last_formula(text: str) -> tuple[str | None, int]:
    """Return the last formula between dollar signs, `\\(` or `\\[`, with those listed before it, and its end."""
    found = list(_FORMULA.finditer(text))
    if not found:
        return None, -1
    parts = [found[-1]]
    for formula in reversed(found[:-1]):
        if not _BETWEEN_JOINED_FORMULAS.fullmatch(text, formula.end(), parts[0].start()):
            break
        parts.insert(0, formula)
    return ", ".join(next(filter(None, part.groups())).strip() for part in parts), found[-1].end()


def last_line(text: str) -> str | None:
    """Return the last line that isn't blank."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else None
