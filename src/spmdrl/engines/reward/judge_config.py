"""Which model judges responses, what it is asked, and how its verdict is read."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Interval

from spmdrl.engines.workers.verdict import MAX_MAGNITUDE

JUDGE_PART = "judge"
"""the name of the judge's part of the reward"""
_FIELD = re.compile(r"\{(\w*)\}")


@dataclass(frozen=True)
class JudgeConfig:
    """A frozen language model that writes a verdict on each response, from which one more part of the reward is read.

    It writes the likeliest tokens, once the policy's responses have ended. Held-out rows are scored without it.
    """

    path: str
    """folder of a Hugging Face model or of a run, whose newest checkpoint it is, or a hub name; it is cut by
    resources.roles.judge, and its tokenizer may differ from the policy's"""
    template: str = (
        "Question:\n{prompt}\n\nReference answer:\n{answer}\n\nResponse:\n{response}\n\n"
        "Rate the response from 0 (wrong) to 10 (right). Write the number alone."
    )
    """what it is asked, with {prompt}, {response} and {answer} in their places; it is put into the chat template of its
    tokenizer, where that has one"""
    max_tokens: Annotated[int, Ge(1)] = 16
    """most tokens of a verdict"""
    pattern: str = r"(-?\d+(?:\.\d+)?)"
    """regular expression whose first group is the number; a row has no reward where it isn't found in the verdict"""
    scale: Annotated[float, Interval(gt=0, lt=math.inf)] = 10.0
    """what the number is divided by"""
    weight: Annotated[float, Interval(gt=-math.inf, lt=math.inf)] = 1.0
    """weight of the judge in the sum that is the reward, beside those of reward.functions"""
    kv_cache_gib: Annotated[float, Gt(0)] = 1.0
    """size of its KV cache on an accelerator in GiB; where rows need more, some wait. A CPU's is as large as needed"""

    def __post_init__(self) -> None:
        if not self.path.strip():
            raise ValueError("reward.judge.path is empty; give a model folder or hub name")
        if "{response}" not in self.template:
            raise ValueError("reward.judge.template has no {response}, which the judge is to read; put it in its place")
        try:
            num_groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"reward.judge.pattern {self.pattern!r} is no regular expression: {error}") from None
        if num_groups == 0:
            raise ValueError(
                f"reward.judge.pattern {self.pattern!r} has no group; put parentheses around the number, as in (\\d+)"
            )

    def question(self, values: Mapping[str, str]) -> str:
        """The template with these values in the places that have their names; other braces stay as they are."""
        return _FIELD.sub(lambda field: values.get(field[1], field[0]), self.template)

    def score(self, verdict: str) -> float | None:
        """The number of a verdict, scaled; None where there is none that a reward can be."""
        found = re.search(self.pattern, verdict)
        try:
            score = float(found[1]) / self.scale if found and found[1] is not None else math.nan
        except ValueError:
            return None
        return score if abs(score) <= MAX_MAGNITUDE else None
