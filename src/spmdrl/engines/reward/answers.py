"""Built-in reward rules: exact text, a plain number, a choice's letter, and math-verify's equivalence.

Rules have TRL's form: `f(prompts, completions, **columns)` returns one value per row, None for a row without an answer,
and an exception for a row that can't be judged.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from spmdrl.engines.reward import formula
from spmdrl.engines.reward.final_answer import last_line, marked_answer, stated_answer
from spmdrl.engines.reward.number import is_same_number
from spmdrl.runtime.installed import how_to_install

Score = float | None | Exception


def exact(prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[Score]:
    """Return 1.0 if the stripped completion equals the stripped answer, else 0.0."""
    return _score(completions, answer, lambda completion, target: completion.strip() == target.strip())


def number(prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[Score]:
    """Return 1.0 if the completion's final answer is the reference's number, else 0.0; references must be numbers."""
    return _score(completions, answer, is_same_number)


def choice(prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[Score]:
    """Return 1.0 if the completion chooses the reference's letter, else 0.0; references must be letters from A to J."""
    return _score(completions, answer, _is_right_choice)


def math(prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[Any], **_: Any) -> list[Score]:
    """Return 1.0 if math-verify finds the completion's final answer equivalent to the reference, else 0.0."""
    return _score(completions, answer, formula.is_right)


RULES: dict[str, Callable[..., list[Score]]] = {"exact": exact, "number": number, "choice": choice, "math": math}


def check_rule_installed(name: str) -> None:
    """Raise ValueError if the rule needs a package that isn't installed."""
    if name == "math" and importlib.util.find_spec("math_verify") is None:
        raise ValueError(
            f"reward.functions: 'math' needs math-verify; {how_to_install('math')}, or use number (plain numbers), "
            "choice (letters) or exact (the same text), which need nothing"
        )


def _is_right_choice(completion: str, reference: str) -> bool:
    """Return True if the letter that a completion marks, states or ends with is the reference's."""
    letter = formula.whole_letter(reference)
    if letter is None:
        raise ValueError(f"the reference '{reference:.100}' isn't a choice's letter, such as B; use the reward exact")
    given = marked_answer(completion) or stated_answer(completion) or last_line(completion) or ""
    given = given.strip(" \t*_$.")
    return letter == (formula.chosen_letter(given) or formula.whole_letter(given.upper()))


def _score(completions: Sequence[str], answers: Sequence[Any], rule: Callable[[str, str], bool]) -> list[Score]:
    return [
        None if target is None else _judged(rule, completion, str(target))
        for completion, target in zip(completions, answers, strict=True)
    ]


def _judged(rule: Callable[[str, str], bool], completion: str, target: str) -> Score:
    try:
        return float(rule(completion, target))
    except (formula.Undecided, ValueError) as problem:
        return problem
