"""Plain numbers as people and models write them, compared as exact fractions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from spmdrl.engines.reward.final_answer import marked_answer
from spmdrl.engines.reward.physical_units import same_unit, split_unit

# Longer digit strings aren't answers, and exact arithmetic on them is too expensive for a reward.
_MAX_NUMBER_CHARACTERS = 100
_SIGN = r"[+-]?"
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d*\\overline\{{\d{{1,9}}\}}|\.\d+)?|(?<!\d)\.\d+)(?:[eE][+-]?\d{{1,2}})?"
_POWER_OF_TEN = r"\s*(?:\\times|\\cdot|[*×])\s*10\s*(?:\^|\*\*)\s*(?:\{\s*([+-]?\d{1,2})\s*\}|([+-]?\d{1,2}))"  # noqa: RUF001
_NUMBER = re.compile(
    rf"""
    (?P<sign>(?<![\w)\]}}.])[+-]\s?)?             # a sign, unless something stands before it to be added to
    (?:\\?(?P<currency>[$€£¥])\s?(?P<inner_sign>{_SIGN}))?
    (?: (?P<latex_whole>\d+)?\s?\\frac\s*\{{\s*(?P<latex_top>{_SIGN}{_DECIMAL})\s*\}}
        \s*\{{\s*(?P<latex_bottom>{_SIGN}{_DECIMAL})\s*\}}
      | (?P<mixed_whole>\d+)\s+(?P<mixed_top>\d+)/(?P<mixed_bottom>\d+)
      | (?P<top>{_DECIMAL})(?:\s?/\s?(?P<bottom>{_DECIMAL})|(?P<power>{_POWER_OF_TEN}))? )
    (?P<percent>\s?(?:\\?%|percent\b))?
    """,
    re.VERBOSE,
)
_CURRENCIES = {"$": "dollar", "€": "euro", "£": "pound", "¥": "yen"}
_OVERLINE = re.compile(r"(\d*)\.(\d*)\\overline\{(\d+)\}")
_VARIABLE = re.compile(r"([A-Za-z])\s*=\s*")
# Not the space after a matrix's `\\\\`.
_SPACES = ((re.compile(r"(?<!\\)\\[!,]\s*"), ""), (re.compile(r"(?<!\\)\\[;: ]"), " "))
_SPELLINGS = (
    ("−", "-"),  # noqa: RUF001
    ("\N{THIN SPACE}", ""),
    ("\N{NARROW NO-BREAK SPACE}", ""),
    ("{,}", ","),
    ("\\left", ""),
    ("\\right", ""),
    ("\\dfrac", "\\frac"),
    ("\\tfrac", "\\frac"),
    ("\\cfrac", "\\frac"),
    ("\\(", ""),
    ("\\)", ""),
    ("\\[", ""),
    ("\\]", ""),
)


@dataclass(frozen=True)
class Number:
    """A number as written: `50%` is 50 with `is_percent`, `18 apples` is 18 with a unit."""

    value: Fraction
    is_percent: bool = False
    unit: str = ""
    name: str = ""
    """name of the variable that has this value, if any"""

    def equals(self, other: Number) -> bool:
        """Compare exactly; no differing units or names; 50% is 50 and also 0.5, unless both are percentages."""
        if not same_unit(self.unit, other.unit) or (self.name and other.name and self.name != other.name):
            return False
        if self.value == other.value:
            return True
        if self.is_percent == other.is_percent:
            return False
        percent, plain = (self, other) if self.is_percent else (other, self)
        return percent.value / 100 == plain.value


def is_same_number(completion: str, reference: str) -> bool:
    """Return True if a completion's final answer is the reference's number.

    The final answer is the last `#### x` or `\\boxed{x}`, or else the last number in the text. A reference may be a
    worked solution that marks its answer. Raises ValueError if the reference isn't a number.
    """
    marked_reference = marked_answer(reference)
    target = parse_number(reference if marked_reference is None else marked_reference)
    if target is None:
        raise ValueError(f"the reference '{reference:.100}' isn't a number; use the reward math, or exact")
    given = marked_answer(completion)
    if given is None:
        given = unmarked_number(completion)
    number = None if given is None else parse_number(given)
    return number is not None and number.equals(target)


def unmarked_number(text: str) -> str | None:
    """Return the last line if it is a number, with its unit; else the last number as written in the text."""
    line = text.strip().rpartition("\n")[2]
    return line if parse_number(line) is not None else last_number(text)[0]


def last_number(text: str) -> tuple[str | None, int]:
    """Return the last number, fraction or percentage as written, and the number of characters after it."""
    text = respelled(text)
    found = list(_NUMBER.finditer(text))
    return (found[-1].group(), len(text) - found[-1].end()) if found else (None, len(text))


def parse_number(text: str) -> Number | None:
    """Return the value of a text that is one number, perhaps with currency, percent, unit or `x =`; else None."""
    if len(text) > 2 * _MAX_NUMBER_CHARACTERS:
        return None
    bare, unit = split_unit(respelled(text).strip(" \t\n*_").rstrip(".").strip())
    if bare.startswith("$") and bare.endswith("$"):
        bare, inner_unit = split_unit(bare.strip("$").strip())
        unit = unit or inner_unit
    variable = _VARIABLE.match(bare)
    bare = (bare[variable.end() :] if variable else bare).strip(" $")
    if bare.startswith("{") and bare.endswith("}"):
        bare = bare[1:-1].strip()
    found = _NUMBER.fullmatch(bare)
    if found is None or len(bare) > _MAX_NUMBER_CHARACTERS:
        return None
    value = _value(found)
    if value is None:
        return None
    unit = unit or _CURRENCIES.get(found.group("currency") or "", "")
    return Number(value, bool(found.group("percent")), unit, variable.group(1) if variable else "")


def _value(found: re.Match[str]) -> Fraction | None:
    part = found.groupdict()
    top = _fraction(part["latex_top"] or part["mixed_top"] or part["top"])
    bottom = _fraction(part["latex_bottom"] or part["mixed_bottom"] or part["bottom"] or "1")
    if bottom == 0:
        return None
    whole = part["latex_whole"] or part["mixed_whole"]
    magnitude = top / bottom
    if whole is not None:
        if magnitude < 0:
            return None
        magnitude += _fraction(whole)
    if part["power"]:
        magnitude *= Fraction(10) ** int(re.split(r"\^|\*\*", part["power"])[1].strip(" {}"))
    signs = (part["sign"] or "") + (part["inner_sign"] or "")
    return -magnitude if signs.count("-") == 1 else magnitude


def _fraction(decimal: str) -> Fraction:
    decimal = decimal.replace(",", "")
    repeating = _OVERLINE.search(decimal)
    if repeating is None:
        return Fraction(decimal)
    whole, fixed, period = repeating.groups()
    start = Fraction(f"{whole or 0}.{fixed or 0}")
    return start + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))


def respelled(text: str) -> str:
    """Normalise minus signs, thousands separators, spaces and fractions; drops delimiters."""
    for spelling, plain in _SPELLINGS:
        text = text.replace(spelling, plain)
    for space, plain in _SPACES:
        text = space.sub(plain, text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{", text)
    return re.sub(r"\\frac\s*(\{[^{}]*\})\s*(\d)", r"\\frac\1{\2}", text)
