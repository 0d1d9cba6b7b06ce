"""Splits rows into micro-batches under a token budget, with equal counts on every data rank.

Shape letters: `B` rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.models.moe import MoeConfig

DEFAULT_TOKENS_PER_MICROBATCH = 16384
# A CPU's activations should stay near its caches: with the larger default an update took 1.8 times as long.
DEFAULT_TOKENS_PER_MICROBATCH_ON_CPU = 4096


@dataclass(frozen=True)
class RowCost:
    """The work of a row of L tokens: `per_token * L + per_token_squared * L**2`."""

    per_token: float
    per_token_squared: float

    def of(self, length: int) -> float:
        return self.per_token * length + self.per_token_squared * length * length

    @classmethod
    def of_model(cls, config: DecoderConfig) -> RowCost:
        """Multiply-adds of a forward pass: each weight that a token meets once, causal attention over half of L**2."""
        num_sparse = 0 if config.moe is None else config.num_layers - len(config.moe.dense_layers)
        per_token = config.num_layers * _attention_weights(config)
        per_token += (config.num_layers - num_sparse) * 3 * config.hidden_size * config.intermediate_size
        if config.moe is not None:
            per_token += num_sparse * _sparse_weights(config.hidden_size, config.moe)
        return cls(
            per_token=per_token + config.num_outputs * config.hidden_size,
            per_token_squared=config.num_layers * config.num_heads * (config.head_size + config.value_head_size) / 2,
        )


def _attention_weights(config: DecoderConfig) -> int:
    """Elements of one layer's projections around attention."""
    latent = config.latent
    if latent is None:
        return config.hidden_size * config.head_size * 2 * (config.num_heads + config.num_kv_heads)
    query_size = config.num_heads * config.head_size
    if latent.query_rank is None:
        queries = config.hidden_size * query_size
    else:
        queries = latent.query_rank * (config.hidden_size + query_size)
    compressed = config.hidden_size * (latent.key_value_rank + latent.rotary_size)
    expanded = latent.key_value_rank * config.num_heads * (latent.plain_size + latent.value_size)
    return queries + compressed + expanded + config.num_heads * latent.value_size * config.hidden_size


def _sparse_weights(hidden_size: int, moe: MoeConfig) -> int:
    """Elements that a token meets in one sparse layer: the router, its own experts and the shared ones."""
    num_met = moe.experts_per_token + moe.num_shared_experts
    return hidden_size * (moe.num_experts + 3 * moe.intermediate_size * num_met)


def plan_microbatches(
    lengths_B: Sequence[int], *, max_tokens: int, cost: RowCost, agree: Callable[[int], int]
) -> list[list[int]]:
    """Rows of each micro-batch, costliest first, at most `max_tokens` in each unless a single row is longer.

    `agree` turns this rank's least count into the count of all data ranks, their maximum; micro-batches for which
    this rank has no rows are empty. Deterministic in its arguments.
    """
    fewest = fewest_microbatches(lengths_B, max_tokens=max_tokens, cost=cost)
    count = agree(len(fewest))
    # An assignment may fail to be found with more micro-batches where it was found with fewer.
    plan = assign_rows(lengths_B, count, max_tokens=max_tokens, cost=cost) or fewest
    plan = plan + [[] for _ in range(count - len(plan))]
    # Ranks run their k-th micro-batches together, so the costly ones should meet.
    return sorted(plan, key=lambda rows: -sum(cost.of(lengths_B[row]) for row in rows))


def fewest_microbatches(lengths_B: Sequence[int], *, max_tokens: int, cost: RowCost) -> list[list[int]]:
    """The assignment with the fewest micro-batches that is found."""
    alone = sum(length >= max_tokens for length in lengths_B)
    count = alone - (-sum(length for length in lengths_B if length < max_tokens) // max_tokens)
    while (plan := assign_rows(lengths_B, count, max_tokens=max_tokens, cost=cost)) is None:
        count += 1
    return plan


def assign_rows(lengths_B: Sequence[int], count: int, *, max_tokens: int, cost: RowCost) -> list[list[int]] | None:
    """Spread the rows over micro-batches of nearly equal costs; None where none is found that keeps the budget.

    A row that fills the budget by itself is alone. Costs are balanced first, then what is over the budget is moved;
    where that fails, balance gives way to packing.
    """
    alone = [[row] for row, length in enumerate(lengths_B) if length >= max_tokens]
    rows = [row for row, length in enumerate(lengths_B) if length < max_tokens]
    count -= len(alone)
    if not rows or count < 1:
        return None if rows or count < 0 else alone + [[] for _ in range(count)]
    costs = [cost.of(lengths_B[row]) for row in rows]
    balanced = [[rows[place] for place in places] for places in largest_differencing(costs, count)]
    kept = _moved_into_budget(balanced, lengths_B, max_tokens=max_tokens, cost=cost)
    kept = kept or _packed_by_length(rows, lengths_B, count, max_tokens=max_tokens)
    return None if kept is None else [*alone, *(sorted(members) for members in kept)]


def _moved_into_budget(
    groups: list[list[int]], lengths_B: Sequence[int], *, max_tokens: int, cost: RowCost
) -> list[list[int]] | None:
    """Move rows, the shortest first, out of micro-batches over the budget to the cheapest ones with room."""
    groups = [sorted(group, key=lambda row: (-lengths_B[row], row)) for group in groups]
    tokens = [sum(lengths_B[row] for row in group) for group in groups]
    costs = [sum(cost.of(lengths_B[row]) for row in group) for group in groups]
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
                costs[k] += sign * cost.of(length)
    return groups


def _packed_by_length(
    rows: Sequence[int], lengths_B: Sequence[int], count: int, *, max_tokens: int
) -> list[list[int]] | None:
    """Put each row, longest first, where it leaves the least room (best-fit decreasing); None if one fits nowhere."""
    groups: list[list[int]] = [[] for _ in range(count)]
    room = [max_tokens] * count
    for row in sorted(rows, key=lambda row: (-lengths_B[row], row)):
        with_room = [k for k in range(count) if room[k] >= lengths_B[row]]
        if not with_room:
            return None
        target = min(with_room, key=lambda k: (room[k], k))
        groups[target].append(row)
        room[target] -= lengths_B[row]
    return groups


@dataclass(frozen=True)
class _Group:
    total: float
    members: list[int]


def largest_differencing(values: Sequence[float], num_groups: int) -> list[list[int]]:
    """Spread the indexes of `values` over groups of nearly equal sums, by the largest differencing method.

    Karmarkar and Karp, The differencing method of set partitioning (UC Berkeley, UCB/CSD-83-113, 1982), for any
    number of groups: the two partial solutions of the largest spread are joined, the heaviest group of one with the
    lightest of the other, until one solution is left. Deterministic; the time is that of sorting.
    """
    # A solution lists its groups that have members, heaviest first; the number breaks ties between equal spreads.
    solutions = [(-value, index, [_Group(value, [index])]) for index, value in enumerate(values)]
    heapq.heapify(solutions)
    for number in range(len(values), 2 * len(values) - 1):
        _, _, groups = heapq.heappop(solutions)
        _, _, others = heapq.heappop(solutions)
        joined = _joined(groups, others, num_groups)
        lightest = joined[-1].total if len(joined) == num_groups else 0.0
        heapq.heappush(solutions, (lightest - joined[0].total, number, joined))
    found = [group.members for group in solutions[0][2]] if solutions else []
    return found + [[] for _ in range(num_groups - len(found))]


def _joined(groups: list[_Group], others: list[_Group], num_groups: int) -> list[_Group]:
    """Join place k of one with place `num_groups - 1 - k` of the other; places past the end are empty."""
    met = range(num_groups - len(others), len(groups))
    pairs = [(groups[place], others[num_groups - 1 - place]) for place in met]
    joined = [_Group(heavy.total + light.total, heavy.members + light.members) for heavy, light in pairs]
    joined += groups[: num_groups - len(others)] + others[: num_groups - len(groups)]
    return sorted(joined, key=lambda group: -group.total)
