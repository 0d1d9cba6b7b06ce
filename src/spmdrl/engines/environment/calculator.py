"""A calculator that completes a model's annotations, `<<48/2=` with `24>>` (Cobbe et al. 2021, arXiv:2110.14168, 4.1).

Set `rollout.stop` to `["="]`, so that an annotation's equals sign ends the turn. Other equals signs get an empty
observation, and a turn without one at its end ends the row.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from spmdrl.engines.environment.episode import End, Episode, Observation

UNKNOWN = "?>>"
"""observation for text that isn't arithmetic"""
_MAX_CHARACTERS = 200
_MAX_EXPONENT = 64
_MAX_DECIMALS = 6
# Not 1e9999, which would be a number of ten thousand digits.
_NUMBER = re.compile(r"[0-9]+\.?[0-9]*|\.[0-9]+")

_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Calculator:
    """Environment that evaluates the expression after the last `<<` of a turn that ends with `=`."""

    def step(self, episode: Episode) -> Observation | End:
        if not episode.response.endswith("="):
            return End()
        before, mark, expression = episode.response[:-1].rpartition("<<")
        if not mark or ">>" in expression:
            return Observation("")
        try:
            return Observation(f"{written(value_of(expression))}>>")
        except (ValueError, ZeroDivisionError):
            return Observation(UNKNOWN)


def value_of(expression: str) -> Fraction:
    """Return the exact value of an expression of decimal numbers, + - * / ** and parentheses.

    Raises ValueError for anything else and for powers that take too long, ZeroDivisionError for division by 0.
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ValueError(f"the expression has {len(expression)} characters, but may have {_MAX_CHARACTERS}")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r} isn't arithmetic") from error
    return _value(tree.body, expression)


def written(value: Fraction) -> str:
    """Write a whole number, or a decimal one rounded to six places."""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.{_MAX_DECIMALS}f}".rstrip("0").rstrip(".")


def _value(node: ast.expr, expression: str) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        text = ast.get_source_segment(expression.strip(), node) or ""
        if not _NUMBER.fullmatch(text):
            raise ValueError(f"{text!r} isn't a plain decimal number")
        # The text, as a float would round it: 0.1 is a tenth.
        return Fraction(text)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _value(node.operand, expression)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base, exponent = _value(node.left, expression), _value(node.right, expression)
        if exponent.denominator != 1 or abs(exponent) > _MAX_EXPONENT or abs(base) > 1 << 32:
            raise ValueError(f"{expression!r} has a power that would take long")
        return Fraction(base ** int(exponent))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left, expression), _value(node.right, expression))
    raise ValueError(f"{expression!r} isn't arithmetic")
