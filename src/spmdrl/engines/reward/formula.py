"""Equivalence of mathematical answers by math-verify, with exceptions for its known errors."""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from spmdrl.engines.reward.final_answer import last_formula, last_line, marked_answer, stated_answer
from spmdrl.engines.reward.number import last_number, parse_number, respelled
from spmdrl.engines.reward.physical_units import same_unit, split_unit

# Simplifying a hostile formula may never end. Measured in CPU time, so that a busy machine changes no reward.
_MAX_CPU_SECONDS = 3.0
_MAX_CHARACTERS = 1000
# math-verify takes differences for 0 that vanish in as many digits; with its own 15, all numbers below 1e-15 are equal.
_NUM_DIGITS = 60
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_CHOICE = re.compile(r"\(?([A-J])\)?")
_LED_CHOICE = re.compile(r"(?:\(([A-J])\)|([A-J])[).:](?=\s))")
_WORDS = re.compile(r"[A-Za-z][A-Za-z'.-]*(?: [A-Za-z][A-Za-z'.-]*)*")
_BASED = re.compile(r"([0-9A-Z]+)_\{?(\d+)\}?")
_MEMBER = re.compile(r"[A-Za-z]\s*\\in\s*(?=[\[(\\])")
_DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?!\\overline)")
_GAP_BETWEEN_NUMBERS = re.compile(r"(?<![\d_])\d+\s+\.?\d")
_ENCLOSED = re.compile(r"[(\[](?:[^()\[\]]|\([^()]*\))*[)\]]|\\\{.*\\\}")
_MISREAD_CAPITAL = re.compile(
    r"(?:\\(Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Upsilon|Phi|Psi|Omega)|(?<![A-Za-z\\])(I))(?![A-Za-z])"
)
_IMAGINARY = re.compile(r"(?<![A-Za-z\\_])i(?![A-Za-z=])")
# Evaluating such a power is one long operation that no signal interrupts.
_HUGE_EXPONENT = re.compile(r"\^\s*\{?\s*[+-]?\d{6,}")
_SPACE = re.compile(r"\s+(?![A-Za-z0-9])|(?<![A-Za-z0-9])\s+")
_SPELLINGS = (
    ("×", r"\times "), ("·", r"\cdot "), ("÷", r"\div "), ("±", r"\pm "), ("≤", r"\le "), ("≥", r"\ge "),
    ("<=", r"\le "), (">=", r"\ge "), ("∞", r"\infty "), ("π", r"\pi "), ("∪", r"\cup "), ("∈", r"\in "),
    ("θ", r"\theta "), ("**", "^"), (r"\leq ", r"\le "), (r"\geq ", r"\ge "), (r"\lbrace", r"\{"), (r"\rbrace", r"\}"),
    (r"\langle", "("), (r"\rangle", ")"), (r"\displaystyle", ""), (r"\quad", " "), ("~", " "),
)  # fmt: skip
_RESPELLINGS = (
    (re.compile(r"√\s*(\w+|\([^()]*\))"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![A-Za-z\\])(pi|sin|cos|tan|cot|log|ln)(?![A-Za-z])"), r"\\\1 "),
    (re.compile(r"²"), r"^2"),
    (re.compile(r"³"), r"^3"),
)


class Undecided(Exception):
    """Raised if comparing two formulas takes longer than allowed."""


def is_right(completion: str, reference: str) -> bool:
    """Return True if a completion's final answer is equivalent to the reference. Raises Undecided.

    The final answer is the last `#### x` or `\\boxed{x}`; without one, the last "the answer is x"; else the last
    formula or number of the text, or its last line. A reference may be a worked solution that marks its answer.
    """
    marked_reference = marked_answer(reference)
    target = reference if marked_reference is None else marked_reference
    given = marked_answer(completion)
    if given is None:
        given = stated_answer(completion) or _unmarked_answer(completion, parse_number(target) is not None)
    return given is not None and is_equivalent(given, target)


def _unmarked_answer(text: str, is_number_wanted: bool) -> str | None:
    line = last_line(text)
    if line is not None and is_number_wanted and parse_number(line) is not None:
        return line
    formula, end = last_formula(text)
    number, num_after = last_number(text) if is_number_wanted else (None, len(text))
    if formula is not None and (number is None or end >= len(text) - num_after):
        return formula
    return number if is_number_wanted else line


def is_equivalent(given: str, target: str) -> bool:
    """Return True if two bare answers are equivalent. Raises Undecided."""
    given, target = _tidy(given), _tidy(target)
    if not given or not target or max(len(given), len(target)) > _MAX_CHARACTERS:
        return False
    if _bare(given) == _bare(target):
        return True
    for decide in (_same_choice, _same_number, _same_words, _same_digits):
        verdict = decide(given, target)
        if verdict is not None:
            return verdict
    (given, unit), (target, target_unit) = split_unit(given), split_unit(target)
    given, target = (_MEMBER.sub("", _in_latex(text)) for text in (given, target))
    if not same_unit(unit, target_unit) or {_bracket(given), _bracket(target)} == {"(", "{"}:
        return False
    if _GAP_BETWEEN_NUMBERS.search(given) or _GAP_BETWEEN_NUMBERS.search(target):
        return False
    return _is_verified(given, target)


def _tidy(text: str) -> str:
    text = respelled(text).strip(" \t\n*").rstrip(".").strip()
    if text.startswith("$") and text.endswith("$"):
        text = text.strip("$").strip()
    whole = _TEXT.fullmatch(text)
    if whole is not None and parse_number(whole.group(1)) is not None:
        text = whole.group(1).strip()
    return re.sub(r"\s+", " ", text)


def _bare(text: str) -> str:
    return _SPACE.sub("", _TEXT.sub(r"\1", text).strip())


def whole_letter(text: str) -> str | None:
    """Return the letter of a text that is a choice, such as C for `(C)` or `\\text{(C)}`."""
    found = _CHOICE.fullmatch(_TEXT.sub(r"\1", text).strip())
    return found.group(1) if found else None


def chosen_letter(text: str) -> str | None:
    """Return `whole_letter`, or the letter before a choice's words, as in `(C) 12`."""
    found = _LED_CHOICE.match(_TEXT.sub(r"\1", text).strip())
    return found.group(1) or found.group(2) if found else whole_letter(text)


def _same_choice(given: str, target: str) -> bool | None:
    """Compare letters of a multiple choice: `\\text{(C)}` and `(C) 12` are C; None if the reference isn't one."""
    letter = whole_letter(target)
    if letter is None:
        return None
    chosen = chosen_letter(given)
    if chosen is None:
        return None if target == letter else False
    return chosen == letter


def _same_number(given: str, target: str) -> bool | None:
    number, target_number = parse_number(given), parse_number(target)
    return None if number is None or target_number is None else number.equals(target_number)


def _same_words(given: str, target: str) -> bool | None:
    """Compare answers in words, ignoring case; None if neither is. math-verify reads words as products of letters."""
    words, target_words = (_WORDS.fullmatch(_TEXT.sub(r"\1", text).strip()) for text in (given, target))
    is_text = [bool(_TEXT.fullmatch(text)) or max(map(len, re.findall("[A-Za-z]+", text)), default=0) > 3
               for text in (given, target)]  # fmt: skip
    if not (words and is_text[0]) and not (target_words and is_text[1]):
        return None
    if words is None or target_words is None:
        return False
    one, other = words.group(), target_words.group()
    return one == other or (len(one) > 1 and one.casefold() == other.casefold())


def _same_digits(given: str, target: str) -> bool | None:
    """Compare numerals of a named base such as `52_8`; None if neither is one. math-verify drops the base."""
    numeral, target_numeral = (_BASED.fullmatch(text.replace(" ", "")) for text in (given, target))
    if numeral is None and target_numeral is None:
        return None
    return numeral is not None and target_numeral is not None and numeral.groups() == target_numeral.groups()


def _in_latex(text: str) -> str:
    for spelling, latex in _SPELLINGS:
        text = text.replace(spelling, latex)
    for pattern, replacement in _RESPELLINGS:
        text = pattern.sub(replacement, text)
    # math-verify reads capital Greek letters as small ones, I as the imaginary unit, and i as a variable.
    text = _MISREAD_CAPITAL.sub(lambda found: f"{{G_{{{found[1] or found[2]}}}}}", text)
    if not re.search(r"\\sum|\\prod|_\{?i|i\s*=", text):
        text = _IMAGINARY.sub(r"{\\sqrt{-1}}", text)
    # As fractions decimals are compared exactly; math-verify rounds them to six places after the point.
    return _DECIMAL.sub(lambda found: rf"\frac{{{int(''.join(found.groups()))}}}{{{10 ** len(found.group(2))}}}", text)


def _bracket(text: str) -> str:
    """Return the bracket around the whole answer: `(` of a tuple or an interval, `{` of a set, or nothing."""
    if not _ENCLOSED.fullmatch(text):
        return ""
    return "(" if text[0] in "([" else "{"


def _is_verified(given: str, target: str) -> bool:
    # Optional back end; `load_functions` has refused the reward if it isn't installed.
    from math_verify import verify

    if _HUGE_EXPONENT.search(given):
        raise Undecided("an exponent of the answer has six digits or more")
    with _limited_time():
        one, other = _parsed(given), _parsed(target)
        if one is None or other is None:
            return False
        return verify(other, one, allow_set_relation_comp=True, numeric_precision=_NUM_DIGITS, timeout_seconds=None)


@lru_cache(maxsize=1024)
def _parsed(latex: str) -> Any:
    """Return the sympy object that math-verify's parser makes of a formula, or None."""
    from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from math_verify.grader import should_treat_as_complex

    # It would strip `m`, `c` and `th` as units: 3c would be 3.
    config = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")
    # It would read N as n.
    cased = ConversionConfig(lowercase_symbols=False)
    try:
        latex = normalize_latex(latex, config)
        is_real = not should_treat_as_complex(latex)
        return latex2sympy(latex, is_real=is_real, normalization_config=None, conversion_config=cased)
    except Exception:  # its parser raises whatever it stumbles over
        return None


@contextmanager
def _limited_time() -> Iterator[None]:
    """Raise Undecided inside the block once it has taken `_MAX_CPU_SECONDS`. Only a main thread can be limited."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_over = False

    class _Over(BaseException):
        """Signal that passes through `except Exception`."""

    def end(*_: object) -> None:
        if not is_over:
            raise _Over

    before = signal.signal(signal.SIGVTALRM, end)
    # Repeated, since an exception in a destructor or a callback is lost.
    signal.setitimer(signal.ITIMER_VIRTUAL, _MAX_CPU_SECONDS, 0.1)
    try:
        yield
    except _Over as over:
        raise Undecided(f"comparing two formulas took more than {_MAX_CPU_SECONDS:g} s of CPU") from over
    finally:
        is_over = True
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
