"""What became of a call, and of one row's reward."""

from __future__ import annotations

import enum
from dataclasses import dataclass

# Sums of a million squares still fit into float32.
MAX_MAGNITUDE = 1e15


class Verdict(enum.IntEnum):
    """How a row was judged; a reward of 0 exists only as `WRONG`, never as a stand-in for a failure."""

    SCORED = 0
    """The reward functions gave values, and not all of them are 0."""
    WRONG = 1
    """The reward functions gave 0, all of them."""
    MALFORMED = 2
    """A function's result has the wrong length or type, isn't finite, or is too large."""
    TIMED_OUT = 3
    """The call was over its deadline and its process was killed, or a rule gave up on a row."""
    CRASHED = 4
    """The function raised, or its process died."""
    LEFT_OUT = 5
    """A function gave None: the row takes no part in the update."""

    @property
    def has_reward(self) -> bool:
        return self in (Verdict.SCORED, Verdict.WRONG)


@dataclass(frozen=True)
class Outcome:
    """What an environment made of a row, in place of reward functions."""

    reward: float | None
    """None exactly where the verdict has none"""
    verdict: Verdict
    error: str | None = None
