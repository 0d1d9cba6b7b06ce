"""Splits rows into micro-batches under a token budget, which is halved where memory runs out.

Shape letters: `B` rows.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

from spmdrl.nouns.partition import largest_differencing

MOST_HALVINGS = 3
"""of the tokens of a micro-batch, in a run"""


def plan_microbatches(
    lengths_B: Sequence[int], costs_B: Sequence[int], *, max_tokens: int, agree: Callable[[int], int]
) -> list[list[int]]:
    """Rows of each micro-batch, costliest first, at most `max_tokens` in each unless a single row is longer.

    A row here is whatever goes through the model in one piece, with the tokens that it computes and what these cost.
    `agree` turns this rank's least count into the count of all data ranks, their maximum; micro-batches for which
    this rank has no rows are empty. Deterministic in its arguments.
    """
    fewest = fewest_microbatches(lengths_B, costs_B, max_tokens=max_tokens)
    count = agree(len(fewest))
    # An assignment may fail to be found with more micro-batches where it was found with fewer.
    plan = assign_rows(lengths_B, costs_B, count, max_tokens=max_tokens) or fewest
    plan = plan + [[] for _ in range(count - len(plan))]
    # Ranks run their k-th micro-batches together, so the costly ones should meet.
    return sorted(plan, key=lambda rows: -sum(costs_B[row] for row in rows))


def fewest_microbatches(lengths_B: Sequence[int], costs_B: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """The assignment with the fewest micro-batches that is found."""
    alone = sum(length >= max_tokens for length in lengths_B)
    count = alone - (-sum(length for length in lengths_B if length < max_tokens) // max_tokens)
    while (plan := assign_rows(lengths_B, costs_B, count, max_tokens=max_tokens)) is None:
        count += 1
    return plan


def assign_rows(
    lengths_B: Sequence[int], costs_B: Sequence[int], count: int, *, max_tokens: int
) -> list[list[int]] | None:
    """Spread the rows over micro-batches of nearly equal costs; None where none is found that keeps the budget.

    A row that fills the budget by itself is alone. Costs are balanced first, then what is over the budget is moved;
    where that fails, balance gives way to packing.
    """
    alone = [[row] for row, length in enumerate(lengths_B) if length >= max_tokens]
    rows = [row for row, length in enumerate(lengths_B) if length < max_tokens]
    count -= len(alone)
    if not rows or count < 1:
        return None if rows or count < 0 else alone + [[] for _ in range(count)]
    costs = [costs_B[row] for row in rows]
    balanced = [[rows[place] for place in places] for places in largest_differencing(costs, count)]
    kept = _moved_into_budget(balanced, lengths_B, costs_B, max_tokens=max_tokens)
    kept = kept or _packed_by_length(rows, lengths_B, count, max_tokens=max_tokens)
    return None if kept is None else [*alone, *(sorted(members) for members in kept)]


def _moved_into_budget(
    groups: list[list[int]], lengths_B: Sequence[int], costs_B: Sequence[int], *, max_tokens: int
) -> list[list[int]] | None:
    """Move rows, the shortest first, out of micro-batches over the budget to the cheapest ones with room."""
    groups = [sorted(group, key=lambda row: (-lengths_B[row], row)) for group in groups]
    tokens = [sum(lengths_B[row] for row in group) for group in groups]
    costs = [sum(costs_B[row] for row in group) for group in groups]
    for over, group in enumerate(groups):
        while tokens[over] > max_tokens:
            row = group.pop()
            length = lengths_B[row]
            with_room = [k for k in range(len(groups)) if k != over and tokens[k] + length <= max_tokens]
            if not with_room:
                return None
            target = min(with_room, key=lambda k: (costs[k], k))
            groups[target].append(row)
            for k, sign in ((over, -1), (target, 1)):
                tokens[k] += sign * length
                costs[k] += sign * costs_B[row]
    return groups


def _packed_by_length(
    rows: Sequence[int], lengths_B: Sequence[int], count: int, *, max_tokens: int
) -> list[list[int]] | None:
    """Put each row, longest first, where it leaves the least room (best-fit decreasing); None if one fits nowhere."""
    groups: list[list[int]] = [[] for _ in range(count)]
    # Ascending; of equal room the first comes first.
    room = [(max_tokens, number) for number in range(count)]
    for row in sorted(rows, key=lambda row: (-lengths_B[row], row)):
        place = bisect.bisect_left(room, (lengths_B[row], 0))
        if place == count:
            return None
        left, number = room.pop(place)
        groups[number].append(row)
        bisect.insort(room, (left - lengths_B[row], number))
    return groups


class MemoryRanOut(RuntimeError):
    """A pass ran out of memory on some rank; it was ended in step with the others, so that it can be done again."""


class MicrobatchLimit:
    """The tokens of a micro-batch at most, the same on every rank; it may be halved three times."""

    def __init__(self, tokens: int):
        self._first = tokens
        self.num_halvings = 0
        self.when_halved: Callable[[str], None] | None = None
        """called with an allocator's words once the limit was halved, on every rank"""

    @property
    def tokens(self) -> int:
        return self.after(self.num_halvings)

    def after(self, num_halvings: int) -> int:
        """The limit once it was halved so often."""
        return max(1, self._first >> num_halvings)

    def halve(self, failure: MemoryRanOut) -> None:
        """Go on with half as many. Raises the failure where that has been done often enough."""
        if self.num_halvings == MOST_HALVINGS or self.tokens == 1:
            raise failure
        self.num_halvings += 1
        if self.when_halved is not None:
            self.when_halved(str(failure))
