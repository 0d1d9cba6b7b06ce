"""Splits rows into micro-batches under a token budget, with equal counts on every data rank.

Shape letters: `B` rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from spmdrl.engines.models.decoder import DecoderConfig
from spmdrl.engines.training.rows import TokenRows

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
        """Multiply-adds of a forward pass: each weight once a token, causal attention twice over half of L**2."""
        attention = config.hidden_size * config.head_size * 2 * (config.num_heads + config.num_kv_heads)
        feed_forward = 3 * config.hidden_size * config.intermediate_size
        head = config.vocab_size * config.hidden_size
        return cls(
            per_token=config.num_layers * (attention + feed_forward) + head,
            per_token_squared=config.num_layers * config.num_heads * config.head_size,
        )


def plan_microbatches(
    lengths_B: Sequence[int], *, max_tokens: int, cost: RowCost, agree: Callable[[int], int]
) -> list[list[int]]:
    """Rows of each micro-batch, costliest first, at most `max_tokens` in each unless a single row is longer.

    `agree` turns this rank's least count into the count of all data ranks, their maximum; micro-batches for which
    this rank has no rows are empty. Deterministic in its arguments.
    """
    fewest = fewest_microbatches(lengths_B, max_tokens=max_tokens, cost=cost)
    count = agree(len(fewest))
    # The greedy rule can fail with more micro-batches where it succeeded with fewer.
    plan = assign_rows(lengths_B, count, max_tokens=max_tokens, cost=cost) or fewest
    plan = plan + [[] for _ in range(count - len(plan))]
    # Ranks run their k-th micro-batches together, so the costly ones should meet.
    return sorted(plan, key=lambda rows: -sum(cost.of(lengths_B[row]) for row in rows))


def fewest_microbatches(lengths_B: Sequence[int], *, max_tokens: int, cost: RowCost) -> list[list[int]]:
    """The assignment with the fewest micro-batches that the greedy rule finds."""
    count = -(-sum(lengths_B) // max_tokens)
    while (plan := assign_rows(lengths_B, count, max_tokens=max_tokens, cost=cost)) is None:
        count += 1
    return plan


def assign_rows(lengths_B: Sequence[int], count: int, *, max_tokens: int, cost: RowCost) -> list[list[int]] | None:
    """Give each row, longest first, to the cheapest micro-batch with room for it; None where no room is left.

    Graham's longest-processing-time rule (SIAM J. Appl. Math. 17(2), 1969). An empty micro-batch has room for any row.
    """
    rows: list[list[int]] = [[] for _ in range(count)]
    tokens, costs = [0] * count, [0.0] * count
    for row in sorted(range(len(lengths_B)), key=lambda row: (-lengths_B[row], row)):
        length = lengths_B[row]
        with_room = [k for k in range(count) if not rows[k] or tokens[k] + length <= max_tokens]
        if not with_room:
            return None
        target = min(with_room, key=lambda k: (costs[k], k))
        rows[target].append(row)
        tokens[target] += length
        costs[target] += cost.of(length)
    return [sorted(members) for members in rows]


def dummy_rows() -> TokenRows:
    """The least rows that run every layer, for a rank with no rows left while its peers still compute."""
    return TokenRows(torch.zeros(2, dtype=torch.int64), torch.tensor([0, 2]), torch.tensor([1]))
