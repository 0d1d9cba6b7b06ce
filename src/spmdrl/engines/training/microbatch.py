"""Division of rows into micro-batches under a token budget, which is halved when memory runs out.

Shape letters: `B` rows.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

from spmdrl.nouns.partition import largest_differencing

MOST_HALVINGS = 3
"""limit per run on halving the tokens of a micro-batch"""


def plan_microbatches(
    lengths_B: Sequence[int], costs_B: Sequence[int], *, max_tokens: int, agree: Callable[[int], int]
) -> list[list[int]]:
    """Plan micro-batches, costliest first, at most `max_tokens` in each unless a single row is longer.

    A row here is a unit of computation, with its computed tokens and their cost. `agree` turns this rank's smallest
    count into the maximum over data ranks; micro-batches for which this rank has no rows are empty. Deterministic in
    its arguments.
    """
    fewest = fewest_microbatches(lengths_B, costs_B, max_tokens=max_tokens)
    count = agree(len(fewest))
    # Assignment may fail with more micro-batches although it succeeds with fewer.
    plan = assign_rows(lengths_B, costs_B, count, max_tokens=max_tokens) or fewest
    plan = plan + [[] for _ in range(count - len(plan))]
    # Ranks run their k-th micro-batches together, so costly ones should coincide.
    return sorted(plan, key=lambda rows: -sum(costs_B[row] for row in rows))


def fewest_microbatches(lengths_B: Sequence[int], costs_B: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Search for the assignment with the fewest micro-batches."""
    alone = sum(length >= max_tokens for length in lengths_B)
    count = alone - (-sum(length for length in lengths_B if length < max_tokens) // max_tokens)
    while (plan := assign_rows(lengths_B, costs_B, count, max_tokens=max_tokens)) is None:
        count += 1
    return plan


def assign_rows(
    lengths_B: Sequence[int], costs_B: Sequence[int], count: int, *, max_tokens: int
) -> list[list[int]] | None:
    """Spread the rows over micro-batches of nearly equal costs; None if none is found within the budget.

    A row that fills the budget by itself is alone. Costs are balanced first, then the excess over the budget is moved;
    if that fails, rows are packed by length instead.
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
    """Move rows, shortest first, out of micro-batches over the budget to the cheapest ones with room."""
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
    """Put each row, longest first, where it leaves the least room (best-fit decreasing); None if one doesn't fit."""
    groups: list[list[int]] = [[] for _ in range(count)]
    # Ascending; ties in order.
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
    """A pass ran out of memory on some rank; all ranks ended it in step, so that it can be repeated."""


class MicrobatchLimit:
    """Most tokens of a micro-batch, the same on every rank; it may be halved three times."""

    def __init__(self, tokens: int):
        self._first = tokens
        self.num_halvings = 0
        self.when_halved: Callable[[str], None] | None = None
        """called on every rank with the allocator's message after halving"""

    @property
    def tokens(self) -> int:
        return self.after(self.num_halvings)

    def after(self, num_halvings: int) -> int:
        """Return the limit after this many halvings."""
        return max(1, self._first >> num_halvings)

    def halve(self, failure: MemoryRanOut) -> None:
        """Halve the limit. Raises the failure if that has been done often enough."""
        if self.num_halvings == MOST_HALVINGS or self.tokens == 1:
            raise failure
        self.num_halvings += 1
        if self.when_halved is not None:
            self.when_halved(str(failure))
