"""Inputs and outputs of reward functions, and their combination to one reward per row."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spmdrl.nouns.settings.role_configs import MAX_MAGNITUDE
from spmdrl.runtime.workers.strikes import Subject
from spmdrl.runtime.workers.verdict import Verdict


@dataclass(frozen=True)
class RewardCall:
    """Rows that are scored together; all lists and columns have one entry per row."""

    prompts: Sequence[Any]
    """strings or lists of messages"""
    completions: Sequence[str]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]]
    subject: Subject | None = None
    """prompt of all rows; it isn't retried after two crashed processes"""

    def __post_init__(self) -> None:
        num_rows = len(self.prompts)
        lengths = {"completions": len(self.completions), "completion_ids": len(self.completion_ids)}
        lengths |= {f"column '{name}'": len(values) for name, values in self.columns.items()}
        wrong = {name: length for name, length in lengths.items() if length != num_rows}
        if wrong:
            raise ValueError(f"a reward call has {num_rows} prompts, but {wrong}; give one entry per row")

    @property
    def num_rows(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True)
class FunctionScores:
    """One function's checked values for a call; a value is None exactly if its verdict has no reward."""

    values: list[float | None]
    verdicts: list[Verdict]
    error: str | None = None

    @classmethod
    def failed(cls, num_rows: int, verdict: Verdict, error: str) -> FunctionScores:
        return cls([None] * num_rows, [verdict] * num_rows, error)


@dataclass(frozen=True)
class RewardResult:
    """Rewards of one call's rows: the weighted sum, and each function's part of it."""

    key: Hashable
    rewards: list[float | None]
    parts: dict[str, list[float | None]]
    verdicts: list[Verdict]
    error: str | None


def combine(key: Hashable, scores: Mapping[str, FunctionScores], weights: Sequence[float]) -> RewardResult:
    """Combine the functions' scores: the weighted sum of their values, if at least one has a value and none failed."""
    verdicts = [row_verdict(row) for row in zip(*(part.verdicts for part in scores.values()), strict=True)]
    values = zip(*(part.values for part in scores.values()), strict=True)
    error = next((part.error for part in scores.values() if part.error), None)
    rewards: list[float | None] = []
    for row, parts in enumerate(values):
        given = [weight * part for weight, part in zip(weights, parts, strict=True) if part is not None]
        reward = sum(given) if verdicts[row].has_reward else None
        if reward is not None and not abs(reward) <= MAX_MAGNITUDE:
            error = error or f"row {row}: the weighted sum is {reward:g}, beyond {MAX_MAGNITUDE:g}; lower the weights"
            verdicts[row], reward = Verdict.MALFORMED, None
        rewards.append(reward)
    return RewardResult(key, rewards, {name: part.values for name, part in scores.items()}, verdicts, error)


def with_part(result: RewardResult, name: str, values: Sequence[float | None], weight: float) -> RewardResult:
    """Add a part with values from elsewhere: None there leaves a row without a reward, like a failed function."""
    rewards: list[float | None] = []
    verdicts = list(result.verdicts)
    for row, (reward, value) in enumerate(zip(result.rewards, values, strict=True)):
        if verdicts[row].has_reward or verdicts[row] is Verdict.LEFT_OUT:
            own = Verdict.SCORED if value else Verdict.WRONG
            verdicts[row] = Verdict.LEFT_OUT if value is None else row_verdict((verdicts[row], own))
        rewards.append(None if value is None or not verdicts[row].has_reward else (reward or 0.0) + weight * value)
    return replace(result, rewards=rewards, parts={**result.parts, name: list(values)}, verdicts=verdicts)


def with_earned(result: RewardResult, earned: Sequence[float]) -> RewardResult:
    """Add what each row earned in its turns to its reward, if it has one."""
    rewards = [None if reward is None else reward + more for reward, more in zip(result.rewards, earned, strict=True)]
    verdicts = [
        Verdict.SCORED if more and verdict is Verdict.WRONG else verdict
        for verdict, more in zip(result.verdicts, earned, strict=True)
    ]
    return replace(result, rewards=rewards, verdicts=verdicts)


def joined(key: Hashable, parts: Sequence[tuple[Sequence[int], RewardResult]]) -> RewardResult:
    """Join the results of rows that several calls scored; the parts' rows partition range(n)."""
    place = {row: (part, at) for part, (rows, _) in enumerate(parts) for at, row in enumerate(rows)}
    places = [place[row] for row in range(len(place))]
    results = [result for _, result in parts]
    return RewardResult(
        key,
        [results[part].rewards[at] for part, at in places],
        {name: [results[part].parts[name][at] for part, at in places] for name in results[0].parts},
        [results[part].verdicts[at] for part, at in places],
        next((result.error for result in results if result.error), None),
    )


def row_verdict(verdicts: Sequence[Verdict]) -> Verdict:
    """Return a row's verdict from each function's: an error outweighs a value, a value outweighs None."""
    for outweighing in (Verdict.QUARANTINED, Verdict.TIMED_OUT, Verdict.CRASHED, Verdict.MALFORMED, Verdict.SCORED):
        if outweighing in verdicts:
            return outweighing
    of_program = next((verdict for verdict in verdicts if verdict.is_of_program), Verdict.WRONG)
    return of_program if any(verdict.has_reward for verdict in verdicts) else Verdict.LEFT_OUT


def read_scores(parts: Any, num_functions: int, num_rows: int) -> list[FunctionScores] | None:
    """Return the scores in a worker's message; None if something other than `score` wrote it."""
    try:
        scores = [FunctionScores(one["values"], list(map(Verdict, one["verdicts"])), one["error"]) for one in parts]
        is_sound = len(scores) == num_functions and all(_is_sound(part, num_rows) for part in scores)
    except (KeyError, TypeError, ValueError):
        return None
    return scores if is_sound else None


def _is_sound(part: FunctionScores, num_rows: int) -> bool:
    if len(part.values) != num_rows or len(part.verdicts) != num_rows or not isinstance(part.error, str | None):
        return False
    return all(
        isinstance(value, float) and abs(value) <= MAX_MAGNITUDE if verdict.has_reward else value is None
        for value, verdict in zip(part.values, part.verdicts, strict=True)
    )


def read_columns(message: Any) -> dict[str, list[str]]:
    """Read columns by function from a worker's message, untrusted: the functions' own code may have changed them."""
    entries = message.items() if isinstance(message, dict) else ()
    return {str(name): list(map(str, columns)) for name, columns in entries if isinstance(columns, list)}
