"""Ranks that take longer for their own work than the others, step after step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from statistics import median_low

RATIO = 1.3
"""ratio to the median rank's own time from which a rank is slow"""
STEPS = 5
"""number of consecutive steps that is no coincidence"""
# Own seconds are sampled: in short steps, a few more samples are chance.
_LEAST_LOST_SECONDS = 0.15
# Stages in which the main rank does more than the others.
_UNEVEN = ("checkpoint", "keep_rollouts", "evaluation")

Seconds = Mapping[str, float]
"""Own seconds of a rank in a step, by stage."""


def ratios(seconds_by_rank: Sequence[Seconds], sets: Collection[range] = ()) -> list[float]:
    """Return each rank's own seconds over the median rank's; 1 for all if nothing was done.

    With `sets`, which hold all ranks in order and work on different things, it is the median of the rank's own set.
    """
    found = []
    for ranks in sets or [range(len(seconds_by_rank))]:
        totals = _totals(seconds_by_rank[ranks.start : ranks.stop])
        middle = median_low(totals)
        found += [total / middle if middle > 0 else 1.0 for total in totals]
    return found


def _totals(seconds_by_rank: Sequence[Seconds]) -> list[float]:
    return [sum(seconds for stage, seconds in own.items() if stage not in _UNEVEN) for own in seconds_by_rank]


class SlowRanks:
    """Warnings of a rank that was slow for some consecutive steps, repeated only after it has recovered."""

    def __init__(self) -> None:
        self._in_a_row: Counter[int] = Counter()

    def warnings(self, seconds_by_rank: Sequence[Seconds], sets: Collection[range] = ()) -> list[str]:
        """Return warnings after a step; ranks are compared within their set."""
        return [
            warning
            for ranks in sets or [range(len(seconds_by_rank))]
            for warning in self._of_set(seconds_by_rank[ranks.start : ranks.stop], ranks.start)
        ]

    def _of_set(self, seconds_by_rank: Sequence[Seconds], first: int) -> list[str]:
        due, totals = [], _totals(seconds_by_rank)
        least = median_low(totals) + _LEAST_LOST_SECONDS
        for place, ratio in enumerate(ratios(seconds_by_rank)):
            rank, is_slow = first + place, ratio > RATIO and totals[place] > least
            self._in_a_row[rank] = self._in_a_row[rank] + 1 if is_slow else 0
            if self._in_a_row[rank] == STEPS:
                stage, worst = _worst_stage(place, seconds_by_rank)
                due.append(
                    f"rank {rank} is slow: its own work took over {RATIO:g} x the median rank's in {STEPS} steps in a "
                    f"row, {ratio:.2f} x now, most of it in {stage} ({worst:.2f} x); look at the load, the clock rates "
                    "and the disks of its node"
                )
        return due


def _worst_stage(rank: int, seconds_by_rank: Sequence[Seconds]) -> tuple[str, float]:
    """Return the stage in which the rank loses most against the median, and its ratio to the median there."""
    own = {stage: seconds for stage, seconds in seconds_by_rank[rank].items() if stage not in _UNEVEN}
    middle = {stage: median_low([other.get(stage, 0.0) for other in seconds_by_rank]) for stage in own}
    stage = max(own, key=lambda name: own[name] - middle[name])
    return stage, own[stage] / max(middle[stage], 1e-9)
