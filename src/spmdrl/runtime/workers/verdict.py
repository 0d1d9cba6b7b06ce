"""Outcomes of calls and of rows' rewards."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Verdict(enum.IntEnum):
    """Outcome of a row's reward; a reward of 0 always means the answer, never a failure of the function."""

    SCORED = 0
    """Reward functions gave values, and not all of them are 0."""
    WRONG = 1
    """Reward functions gave 0 or None, at least one 0, without a more precise verdict."""
    MALFORMED = 2
    """A function's result has the wrong length or type, isn't finite, or is too large."""
    TIMED_OUT = 3
    """The call was over its deadline and its process was killed, or a rule gave up on a row."""
    CRASHED = 4
    """The function raised, or its process died."""
    LEFT_OUT = 5
    """No function gave a value, all None: the row takes no part in the update."""
    NO_PROGRAM = 6
    """The reward `code` gave 0: the response holds no program."""
    PROGRAM_TIMED_OUT = 7
    """The reward `code` gave 0: the program was ended at a test's limit, or its row's."""
    PROGRAM_CRASHED = 8
    """The reward `code` gave 0: the program raised, or was ended by a signal."""
    PROGRAM_OUT_OF_MEMORY = 9
    """The reward `code` gave 0: the program wanted more memory than it may have."""
    QUARANTINED = 10
    """No function was called: the row's prompt had cost two workers before."""

    @property
    def has_reward(self) -> bool:
        return self in (Verdict.SCORED, Verdict.WRONG) or self.is_of_program

    @property
    def is_of_program(self) -> bool:
        """True for the reasons of a 0 from the reward `code`."""
        return Verdict.NO_PROGRAM <= self <= Verdict.PROGRAM_OUT_OF_MEMORY


# Verdicts on the reward function, not on the answer.
FAILURES = frozenset({Verdict.MALFORMED, Verdict.TIMED_OUT, Verdict.CRASHED})


@dataclass(frozen=True)
class Outcome:
    """An environment's result for a row, in place of reward functions."""

    reward: float | None
    """None exactly if the verdict has no reward"""
    verdict: Verdict
    error: str | None = None
