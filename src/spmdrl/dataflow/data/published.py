"""Benchmarks as published: the columns of their parts, and a row's prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmdrl.dataflow.data.column_names import Column, FoundColumns, look_up
from spmdrl.dataflow.data.formats import Flaw

_LETTERS = "ABCD"
_IN_A_BOX = "{question}\n\nThink step by step, and put the final answer in \\boxed{{}}."


@dataclass(frozen=True)
class PublishedFormat:
    """Columns of a benchmark's parts, each under several names, and its prompt template."""

    question: tuple[str, ...]
    answer: tuple[str, ...]
    template: str
    completion: tuple[str, ...] = ()
    """text for supervised training if the row has it, else the answer"""
    wrong_choices: tuple[str, ...] = ()
    """columns of wrong choices beside the right one in the answer's column; the answer is its letter"""
    mark: str = ""
    """text that every answer contains"""

    @property
    def wanted(self) -> str:
        """Required columns, for messages."""
        names = (self.question, self.answer, *((name,) for name in self.wrong_choices))
        return ", ".join("|".join(names_of_one) for names_of_one in names)


FORMATS: Mapping[str, PublishedFormat] = {
    "gsm8k": PublishedFormat(
        ("question",), ("answer",), '{question}\n\nThink step by step, and write the final answer after "####".',
        mark="####",
    ),
    "math500": PublishedFormat(("problem",), ("answer",), _IN_A_BOX, completion=("solution",)),
    "aime": PublishedFormat(
        ("problem", "Problem", "question"), ("answer", "Answer"), _IN_A_BOX, completion=("solution", "Solution")
    ),
    "gpqa": PublishedFormat(
        ("Question",), ("Correct Answer",),
        "{question}\n\nA) {A}\nB) {B}\nC) {C}\nD) {D}\n\n"
        'Think step by step, and end with a line "Answer: X", where X is the letter of the right choice.',
        wrong_choices=("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"),
    ),
}  # fmt: skip


def published_columns(name: str, values: Mapping[str, Any]) -> FoundColumns:
    """Return the parts of a benchmark's row, with its prompt rendered.

    Raises Flaw for columns other than the benchmark's, and for a question without a single right choice.
    """
    form = FORMATS[name]
    question, answer, completion = (look_up(values, keys) for keys in (form.question, form.answer, form.completion))
    wrong = [look_up(values, (key,)) for key in form.wrong_choices]
    if any(column.key is None for column in (question, answer, *wrong)) or form.mark not in str(answer.value):
        mark = f", the answer with {form.mark!r} in it" if form.mark else ""
        raise Flaw(
            "other_format",
            f"a row of the format {name} has the columns {form.wanted}{mark}; this one's are "
            f"{', '.join(values) or 'none'}: set data.format to what the file holds, or to auto",
        )
    parts = {"question": _text(question)}
    if wrong:
        right, others = _text(answer), [_text(column) for column in wrong]
        if right in others:
            raise Flaw("two_right", f"'{answer.key}' is also a wrong choice, so that two letters would be right")
        choices = _shuffled([right, *others], f"0:{parts['question']}")
        parts |= dict(zip(_LETTERS, choices, strict=True))
        answer = Column(answer.key, _LETTERS[choices.index(right)])
    return FoundColumns(Column(question.key, form.template.format(**parts)), answer, completion)


def _text(column: Column) -> str:
    """Return a column's text, stripped. Raises Flaw if it has none."""
    is_usable = isinstance(column.value, (str, int, float)) and not isinstance(column.value, bool)
    text = str(column.value).strip() if is_usable else ""
    if not text:
        raise Flaw("no_text", f"'{column.key}' is {column.value!r:.60}, but must be text or a number")
    return text


def _shuffled(choices: Sequence[str], key: str) -> list[str]:
    """Shuffle by the key and the choices' places alone, independent of other rows."""
    places = sorted(range(len(choices)), key=lambda place: hashlib.sha256(f"{place}:{key}".encode()).digest())
    return [choices[place] for place in places]
