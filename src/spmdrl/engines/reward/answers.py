"""Built-in reward rules: the exact answer, and a number, fraction or formula found in free text.

Rules have TRL's form: `f(prompts, completions, **columns)` gives one value a row; None where a row has no answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

# Longer digit strings aren't answers, and exact arithmetic on them costs more than a reward may.
_MAX_NUMBER_CHARACTERS = 100
_DECIMAL = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)(?:[eE][+-]?\d{1,2})?"
_NUMBER = re.compile(
    rf"""
    (?P<minus>(?<![\w)\]}}.])-)?                  # a sign, unless something stands before it to be subtracted from
    (?:\\?[$€£¥]\s?(?P<inner_minus>-)?)?
    (?: (?P<latex_whole>\d+)?\\frac\{{(?P<latex_top>-?{_DECIMAL})\}}\{{(?P<latex_bottom>{_DECIMAL})\}}
      | (?P<mixed_whole>\d+)\s+(?P<mixed_top>\d+)/(?P<mixed_bottom>\d+)
      | (?P<top>{_DECIMAL})(?:\s?/\s?(?P<bottom>{_DECIMAL}))? )
    (?P<percent>\s?(?:\\?%|percent\b))?
    """,
    re.VERBOSE,
)
_HASHES = re.compile(r"####\s*([^\s#][^\n#]*)")
_BRACE = re.compile(r"\\boxed\s*\{|[{}]")
_UNIT = re.compile(r"\\(?:text|mathrm|mbox)\{[^{}]*\}(?:\^\{?\d\}?)?|\^\{?\\circ\}?|°")
_TRAILING_WORDS = re.compile(r"(?<=[\d}%])(?:\s+[A-Za-z]+)+$")
_VARIABLE = re.compile(r"^[A-Za-z]\s*=\s*")
_SPELLINGS = (
    ("−", "-"),  # noqa: RUF001
    ("{,}", ","),
    ("\\!", ""),
    ("\\,", ""),
    ("\\;", " "),
    ("\\ ", " "),
    ("\\left", ""),
    ("\\right", ""),
    ("\\dfrac", "\\frac"),
    ("\\tfrac", "\\frac"),
    ("\\(", ""),
    ("\\)", ""),
    ("\\[", ""),
    ("\\]", ""),
    ("*", ""),
)


@dataclass(frozen=True)
class Number:
    """A number as written: `50%` is 50 with `is_percent`."""

    value: Fraction
    is_percent: bool = False

    def equals(self, other: Number) -> bool:
        """Exact equality; where only one is a percentage it may also mean a hundredth: 50% is 50 and 0.5."""
        if self.value == other.value:
            return True
        if self.is_percent == other.is_percent:
            return False
        percent, plain = (self, other) if self.is_percent else (other, self)
        return percent.value / 100 == plain.value


def exact(prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1.0 where the stripped completion equals the stripped answer, else 0.0."""
    return _score(completions, answer, lambda completion, target: completion.strip() == target.strip())


def math(prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1.0 where the completion's final answer has the same value as the reference, else 0.0."""
    return _score(completions, answer, is_right)


RULES: dict[str, Callable[..., list[float | None]]] = {"exact": exact, "math": math}


def _score(completions: Sequence[str], answers: Sequence[Any], rule: Callable[[str, str], bool]) -> list[float | None]:
    pairs = zip(completions, answers, strict=True)
    return [None if target is None else float(rule(completion, str(target))) for completion, target in pairs]


def is_right(completion: str, reference: str) -> bool:
    """Whether a completion's final answer equals the reference, as an exact fraction or else as a normalised formula.

    The final answer is what the last `#### x` or `\\boxed{x}` holds; without one, the last number in the text
    where the reference is a number, and otherwise the last line. A reference may be a whole worked solution.
    """
    marked_reference = marked_answer(reference)
    target = reference if marked_reference is None else marked_reference
    target_number = parse_number(target)
    given = marked_answer(completion)
    if given is None:
        given = _unmarked_answer(completion, target_number is not None)
    if given is None:
        return False
    number = parse_number(given)
    if number is not None and target_number is not None:
        return number.equals(target_number)
    return normalised(given) == normalised(target)


def marked_answer(text: str) -> str | None:
    """What the last `#### x` (to the end of its line) or closed `\\boxed{x}` holds, whichever comes later."""
    hashes = list(_HASHES.finditer(text))
    start, boxed = _last_box(text)
    if hashes and hashes[-1].start() > start:
        # `#### \boxed{18}` marks its answer twice.
        return marked_answer(hashes[-1].group(1)) or hashes[-1].group(1).strip()
    return boxed


def _last_box(text: str) -> tuple[int, str | None]:
    """Where the last closed box starts and what it holds; (-1, None) without one. One pass, however they nest."""
    last: tuple[int, str | None] = (-1, None)
    opened: list[re.Match[str]] = []
    for brace in _BRACE.finditer(text):
        if brace.group() != "}":
            opened.append(brace)
        elif opened:
            start = opened.pop()
            if len(start.group()) > 1 and start.start() > last[0]:
                last = (start.start(), text[start.end() : brace.start()].strip())
    return last


def _unmarked_answer(text: str, is_number_wanted: bool) -> str | None:
    line = last_line(text)
    if not is_number_wanted or (line is not None and parse_number(line) is not None):
        return line
    return last_number(text)


def last_number(text: str) -> str | None:
    """The last number, fraction or percentage as written in the text."""
    found = [number.group() for number in _NUMBER.finditer(_respelled(text))]
    return found[-1] if found else None


def last_line(text: str) -> str | None:
    lines = text.strip().splitlines()
    return lines[-1] if lines else None


def parse_number(text: str) -> Number | None:
    """The value of a text that is one number, with or without a currency, percent sign, unit or `x =`; else None."""
    bare = _UNIT.sub("", _respelled(text)).strip().rstrip(".")
    if bare.startswith("$") and bare.endswith("$"):
        bare = bare.strip("$")
    bare = _VARIABLE.sub("", _TRAILING_WORDS.sub("", bare) if not bare.endswith("percent") else bare).strip(" $")
    found = _NUMBER.fullmatch(bare)
    if found is None or len(bare) > _MAX_NUMBER_CHARACTERS:
        return None
    part = found.groupdict()
    top = _fraction(part["latex_top"] or part["mixed_top"] or part["top"])
    bottom = _fraction(part["latex_bottom"] or part["mixed_bottom"] or part["bottom"] or "1")
    if bottom == 0:
        return None
    magnitude = _fraction(part["latex_whole"] or part["mixed_whole"] or "0") + top / bottom
    is_negative = bool(part["minus"]) != bool(part["inner_minus"])
    return Number(-magnitude if is_negative else magnitude, bool(part["percent"]))


def _fraction(decimal: str) -> Fraction:
    return Fraction(decimal.replace(",", ""))


def normalised(text: str) -> str:
    """A formula without what doesn't change its meaning: spaces, dollar signs, \\text, optional braces, case."""
    bare = re.sub(r"\\(?:text|mathrm|mathbf|mbox)\{([^{}]*)\}", r"\1", _respelled(text))
    bare = re.sub(r"\^\{?\\circ\}?|[\s$°]", "", bare).rstrip(".")
    bare = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", bare)
    bare = re.sub(r"([\^_])\{(\w)\}", r"\1\2", bare)
    return bare.casefold()


def _respelled(text: str) -> str:
    for spelling, plain in _SPELLINGS:
        text = text.replace(spelling, plain)
    return re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
