"""Rules of alerts as text: `< 0.05`, `> 0.2 for 3`, `< 0.1 x first and reward_std > 0.2 for 5`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

SYMPTOMS = (
    "learning-rate-too-high", "rewards-all-tied", "answers-truncated", "entropy-collapse", "rollout-mismatch",
    "lengths-grow", "eval-falls-while-reward-rises", "updates-skipped", "not-finite", "steps-unfilled", "slow-ranks",
)  # fmt: skip
"""names of the rules that a run has without any of its own"""
NEVER = "never"
MOST_STEPS = 100
FIRST_STEPS = 3
"""number of steps whose mean is a metric's `first`"""

_CONDITION = re.compile(r"(?:(\S+)\s+)?(<|>)\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?)(\s*x\s+first)?")
_STEPS = re.compile(r"(.*?)(?:\s+for\s+(\d+))?")


@dataclass(frozen=True)
class Condition:
    """Comparison of a metric with a number, or with a multiple of the mean of its first steps."""

    metric: str
    is_above: bool
    number: float
    is_relative: bool

    def holds(self, value: float, first: float) -> bool:
        bound = self.number * first if self.is_relative else self.number
        return value > bound if self.is_above else value < bound


@dataclass(frozen=True)
class AlertRule:
    """Conditions that must all hold in a number of consecutive steps."""

    FORM: ClassVar[str] = "'< 0.05', '> 0.2 for 3' or '< 0.1 x first and reward_std > 0.2', or never"
    text: str
    conditions: tuple[Condition, ...]
    num_steps: int

    @classmethod
    def read(cls, metric: str, text: str) -> AlertRule:
        """Read a rule of a metric. Raises ValueError for text of another form."""
        body, steps = _STEPS.fullmatch(text.strip()).groups()  # type: ignore[union-attr]
        found = [_CONDITION.fullmatch(part.strip()) for part in re.split(r"\s+and\s+", body)]
        num_steps = int(steps or 1)
        if None in found or (found[0] is not None and found[0][1]) or not 1 <= num_steps <= MOST_STEPS:
            raise ValueError(
                f"log.alerts.{metric} is {text!r}, but must be a rule such as {cls.FORM}, and for at most "
                f"{MOST_STEPS} steps"
            )
        conditions = tuple(
            Condition(part[1] or metric, part[2] == ">", _number(metric, part[3]), bool(part[4]))
            for part in found
            if part is not None
        )
        return cls(f"{metric} {text.strip()}", conditions, num_steps)

    def holds(self, history: Sequence[Mapping[str, float]]) -> bool:
        """Return True if the newest steps that have all of its metrics fulfil it; the newest of all must be one."""
        names = [condition.metric for condition in self.conditions]
        having = [step for step in history if all(name in step for name in names)]
        if len(having) < self.num_steps or not history or having[-1] is not history[-1]:
            return False
        early = having[:FIRST_STEPS]
        first = {name: sum(step[name] for step in early) / len(early) for name in names}
        return all(
            condition.holds(step[condition.metric], first[condition.metric])
            for step in having[-self.num_steps :]
            for condition in self.conditions
        )


def _number(metric: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"log.alerts.{metric} compares with {text!r}, which is no number") from None


def read_rules(alerts: Mapping[str, str]) -> dict[str, AlertRule]:
    """Return the rules of `log.alerts` by metric, without those that only switch a symptom off. Raises ValueError."""
    for name, text in alerts.items():
        if text == NEVER and name not in SYMPTOMS:
            raise ValueError(
                f"log.alerts.{name} is never, but there is no such symptom; the symptoms are {', '.join(SYMPTOMS)}"
            )
        if text != NEVER and name in SYMPTOMS:
            raise ValueError(
                f"log.alerts.{name} is {text!r}, but a symptom can only be switched off, by never; write a rule of a "
                "metric, such as {entropy: '< 0.05'}"
            )
    return {name: AlertRule.read(name, text) for name, text in alerts.items() if text != NEVER}
