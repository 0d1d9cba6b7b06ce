"""Generated arithmetic rows, named like a file: `synthetic://addition?low=0&high=99&count=4000&split=train&seed=0`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from spmdrl.observability.terminal.spelling import unknown

SCHEME = "synthetic://"
# Up to this many pairs are all shuffled; of more, pairs are drawn until enough differ.
_MAX_ENUMERATED_PAIRS = 1 << 20

Operation = Literal["addition", "subtraction", "difference", "multiplication", "division"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)


@dataclass(frozen=True)
class SyntheticTask:
    """One arithmetic operation on two whole numbers between `low` and `high`; a difference is never negative.

    A pair belongs to the train or the test split by a hash of the pair alone, so the splits are disjoint whatever
    the seed and count; `a+b` and `b+a` are in the same one.
    """

    operation: Operation
    low: int = 0
    high: int = 99
    count: int = 1000
    split: Literal["train", "test"] = "train"
    test_fraction: float = 0.1
    seed: int = 0
    prompt: str = ""
    """prompt in place of `left+right=`: a text with {left}, {sign} and {right} in it"""
    completion: str = ""
    """text for supervised training in place of the answer, with {prompt} and {answer} in it"""
    max_error: int = 0
    """above 0, rows are pairs too: the answer is preferred to a wrong one, which differs from it by at most this"""

    def __post_init__(self) -> None:
        if self.operation not in OPERATIONS:
            raise ValueError(unknown("there is no synthetic task", self.operation, OPERATIONS))
        if self.split not in ("train", "test"):
            raise ValueError(f"split={self.split} in a synthetic URL, but it must be train or test")
        if self.low > self.high or self.count < 1:
            raise ValueError(
                f"low={self.low}&high={self.high}&count={self.count}: low <= high and count >= 1 are needed"
            )
        _check_names("prompt", self.prompt, ("left", "sign", "right"))
        _check_names("completion", self.completion, ("prompt", "answer"))
        if self.max_error < 0:
            raise ValueError(f"max_error={self.max_error} in a synthetic URL, but it must be 0 or more")
        if not 0 < self.test_fraction < 1:
            raise ValueError(f"test_fraction={self.test_fraction} in a synthetic URL, but it must be between 0 and 1")

    def holds(self, left: int, right: int) -> bool:
        """Return True if the pair belongs to this task's split."""
        if (self.operation == "division" and right == 0) or (self.operation == "difference" and left < right):
            return False
        pair = (left, right)
        if self.operation in ("addition", "multiplication"):
            pair = (min(pair), max(pair))
        is_test = _hashed(f"{self.operation}:{pair[0]}:{pair[1]}") < self.test_fraction * 2**64
        return is_test == (self.split == "test")

    def row(self, left: int, right: int) -> dict[str, Any]:
        """Return the question with its answer; a division is built from its quotient, so that it has no remainder."""
        if self.operation == "addition":
            first, sign, answer = left, "+", left + right
        elif self.operation in ("subtraction", "difference"):
            first, sign, answer = left, "-", left - right
        elif self.operation == "multiplication":
            first, sign, answer = left, "*", left * right
        else:
            first, sign, answer = left * right, "/", left
        text = self.prompt or "{left}{sign}{right}="
        prompt = text.replace("{left}", str(first)).replace("{sign}", sign).replace("{right}", str(right))
        row = {"id": f"{self.operation}:{left}:{right}", "prompt": prompt, "answer": str(answer)}
        if self.completion:
            row["completion"] = self.completion.replace("{prompt}", prompt).replace("{answer}", str(answer))
        if self.max_error:
            error = 1 + _hashed(f"{self.seed}:{row['id']}") % (2 * self.max_error)
            wrong = answer + (error if error <= self.max_error else self.max_error - error)
            row |= {"chosen": str(answer), "rejected": str(wrong)}
        return row


def parse_synthetic(url: str) -> SyntheticTask:
    """Return the task of a `synthetic://` URL. Raises ValueError for unknown tasks, names and values."""
    parts = urlsplit(url)
    types = {field.name: field.type for field in fields(SyntheticTask) if field.name != "operation"}
    values: dict[str, Any] = {}
    for name, text in parse_qsl(parts.query, keep_blank_values=True):
        if name not in types:
            raise ValueError(unknown(f"{url}: there is no setting", name, tuple(types)))
        try:
            values[name] = {"int": int, "float": float}.get(str(types[name]), str)(text)
        except ValueError as error:
            raise ValueError(f"{url}: {name}={text}, but it must be of type {types[name]}") from error
    return SyntheticTask(parts.netloc, **values)  # type: ignore[arg-type]  # __post_init__ checks the name


def synthetic_rows(url: str) -> list[dict[str, Any]]:
    """Return the URL's rows, all different, in an order that depends only on the URL."""
    task = parse_synthetic(url)
    rows = []
    for left, right in _shuffled_pairs(task):
        if task.holds(left, right):
            rows.append(task.row(left, right))
            if len(rows) == task.count:
                return rows
    raise ValueError(
        f"{url}: count={task.count}, but the {task.split} split has only {len(rows)} questions between "
        f"{task.low} and {task.high}; lower count, or widen low and high"
    )


def _shuffled_pairs(task: SyntheticTask) -> Iterator[tuple[int, int]]:
    """Yield distinct pairs in random order: all if they are few, else as many as `count` may need."""
    span = task.high - task.low + 1
    bits = np.random.Philox(np.random.SeedSequence((task.seed, span)))
    if span**2 <= _MAX_ENUMERATED_PAIRS:
        indexes = np.argsort(bits.random_raw(span**2), kind="stable").tolist()
    else:
        # Enough draws for the smaller split's count; only few repeat.
        share = task.test_fraction if task.split == "test" else 1 - task.test_fraction
        share /= 2 if task.operation == "difference" else 1
        draws = bits.random_raw(2 * int(2 * task.count / share + 1000)).tolist()
        pairs = zip(draws[::2], draws[1::2], strict=True)
        indexes = dict.fromkeys((left % span) * span + right % span for left, right in pairs)
    for index in indexes:
        yield task.low + index // span, task.low + index % span


def _hashed(text: str) -> int:
    """Hash a text to 64 bits."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _check_names(key: str, text: str, known: tuple[str, ...]) -> None:
    for name in re.findall(r"\{(.*?)\}", text):
        if name not in known:
            raise ValueError(unknown(f"{key} in a synthetic URL has no", name, known))
