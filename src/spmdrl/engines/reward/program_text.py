"""The program in a response."""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any

_FENCED = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
_LANGUAGES = ("", "py", "python", "python3")
_END_OF_THOUGHT = "</think>"


def program_in(response: str, prompt: Any) -> str | None:
    """The last fenced block of Python after the thoughts; without fences the whole response, where it is Python.

    A response may go on with a program that its prompt begins, as HumanEval's do.
    """
    answer = response.rpartition(_END_OF_THOUGHT)[2]
    if blocks := [text for language, text in _FENCED.findall(answer) if language.lower() in _LANGUAGES]:
        return blocks[-1] if blocks[-1].strip() else None
    if "```" in answer:
        return None
    begun = [prompt + response] if isinstance(prompt, str) else []
    return next((text for text in (answer, *begun) if is_program(text)), None)


def is_program(text: str) -> bool:
    """Whether a text is Python that defines or does something."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    # A word or a number is Python too.
    return any(not isinstance(one, ast.Expr) or isinstance(one.value, ast.Call) for one in tree.body)
