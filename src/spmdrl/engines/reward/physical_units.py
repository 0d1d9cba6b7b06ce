"""Units behind an answer: `18 apples`, `15\\text{ cm}^2`, `90^\\circ`."""

from __future__ import annotations

import re

_WORDS = r"[A-Za-z]+(?:[ /.-]+[A-Za-z]+){0,4}\.?"
_TEXT_UNIT = re.compile(
    rf"\s*\\(?:text|mathrm|mbox|textrm|textnormal|rm)\s*\{{\s*(?P<words>{_WORDS})\s*(?:\^?(?P<inner>[23]))?\s*\}}"
    r"(?:\^\s*\{?(?P<power>[23])\}?)?$"
)
_PLAIN_UNIT = re.compile(rf"(?<=[\d)}}%])\s+(?P<words>{_WORDS})(?:\^\s*\{{?(?P<power>[23])\}}?)?$")
_DEGREES = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree|°|\\text\{\s*°\s*\})$")
# Words that change the answer before them aren't units: they are a closed class, units an open one.
_NO_UNIT = frozenset(
    "about all alpha also an and any arccos arcsin arctan are as at base beta billion but by cos cot csc d dozen "
    "dozens e each either else equals false fifth fifths first for fourth fourths from gamma half halves hundred "
    "hundreds hundredths i if infinity k lambda less lim ln log many maybe million millions minus mod modulo more "
    "most nearly neither nil no none nor not nothing on only or other otherwise over percent percentage perhaps "
    "phi pi plus quarter sin so some sqrt tan tau tenth tenths than the then theta third thirds thousand "
    "thousands time times to trillion true twice undefined union unless until up versus vs we with without wrong "
    "x y zero".split()
)
_SAME = {
    "cm": "centimeter", "mm": "millimeter", "m": "meter", "km": "kilometer", "in": "inch", "inches": "inch",
    "ft": "foot", "feet": "foot", "yd": "yard", "mi": "mile", "kg": "kilogram", "g": "gram", "mg": "milligram",
    "lb": "pound", "lbs": "pound", "oz": "ounce", "l": "liter", "ml": "milliliter", "litre": "liter", "metre": "meter",
    "s": "second", "sec": "second", "secs": "second", "min": "minute", "mins": "minute", "h": "hour", "hr": "hour",
    "hrs": "hour", "yr": "year", "yrs": "year", "deg": "degree", "mph": "mile per hour", "usd": "dollar",
    "square": "sq", "cu": "cubic", "centimetre": "centimeter", "kilometre": "kilometer", "men": "man", "women": "woman",
    "children": "child", "people": "person",
}  # fmt: skip
_SHORT = frozenset("am pm sq per of cup day man egg toy pie ton car cat dog box bag pen row set way year".split())


def split_unit(text: str) -> tuple[str, str]:
    """Return the text without the unit at its end, and that unit in one spelling, or an empty string."""
    degrees = _DEGREES.search(text)
    if degrees and degrees.start() > 0:
        return text[: degrees.start()].strip(), "degree"
    found = _TEXT_UNIT.search(text) or _PLAIN_UNIT.search(text)
    if found is None or found.start() == 0:
        return text, ""
    words = re.split(r"[ .-]+", found.group("words").rstrip(".").replace("/", " per "))
    groups = found.groupdict()
    is_text = "inner" in groups
    if not all(_is_unit_word(word.lower(), is_text) for word in words):
        return text, ""
    power = groups["power"] or groups.get("inner") or ""
    unit = " ".join(_singular(word) for word in words)
    for square, digit in (("sq ", "2"), ("cubic ", "3")):
        if unit.startswith(square):
            unit, power = unit.removeprefix(square), digit
    return text[: found.start()].strip(), unit + power


def _is_unit_word(word: str, is_text: bool) -> bool:
    if word in _NO_UNIT:
        return False
    # Short words outside \\text may be products of variables.
    return is_text or len(word) > 3 or word in _SHORT or (len(word) > 1 and word in _SAME)


def _singular(word: str) -> str:
    word = word.lower()
    word = _SAME.get(word, word)
    singular = word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
    return _SAME.get(singular, singular)


def same_unit(one: str, other: str) -> bool:
    """Return True if two units may be the same: an answer may omit its unit, but not have another one."""
    return not one or not other or one == other
