"""How evenly a step's work is dealt, on log-normal lengths: pure functions of integers, as ranks evaluate them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from spmdrl.dataflow.samples.balancing.balance import SLACK_PERCENT, RowLoads, Taker, assign_rows, deal_groups
from spmdrl.dataflow.samples.balancing.dealing import GroupLengths
from spmdrl.engines.models.decoder import row_cost_of
from spmdrl.engines.training.microbatch import plan_microbatches
from spmdrl.nouns.batch import Integers
from spmdrl.nouns.partition import ROWS, RowCost
from tests.bench.harness.bench_models import QWEN_7B

COST = row_cost_of(QWEN_7B)
TOKENS_PER_MICROBATCH = 16384
LONGEST = 8192
# Together a log-normal with a sigma of 0.8, two thirds of whose variance are the prompts'.
_SIGMA_OF_PROMPTS, _SIGMA_OF_RESPONSES, _MEDIAN = 0.65, 0.46, 600


@dataclass(frozen=True)
class DrawnLengths:
    """Tokens of each group's prompt, of its responses in a step, and of those in the epoch before."""

    prompts_G: Integers
    responses_GN: Integers
    before_GN: Integers

    @property
    def rows(self) -> Integers:
        """Tokens of each row, prompt included."""
        return (self.prompts_G[:, None] + self.responses_GN).ravel()


@dataclass(frozen=True)
class DealtStep:
    """What became of one deal of a step."""

    generation: Integers
    """work of each replica"""
    update: Integers
    """work of each rank"""
    idle_share: float
    """of the time of an update in which ranks wait for the slowest one of each micro-batch"""
    foreign_rows: int
    least_foreign_rows: int


def draw_lengths(num_groups: int, group_size: int, *, seed: int) -> DrawnLengths:
    random = np.random.default_rng(seed)
    means_G = random.lognormal(0, _SIGMA_OF_PROMPTS, (num_groups, 1)) * _MEDIAN

    def responses() -> Integers:
        factors = random.lognormal(0, _SIGMA_OF_RESPONSES, (num_groups, group_size))
        return (means_G * factors).clip(1, LONGEST).astype(np.int64)

    return DrawnLengths(random.integers(32, 513, num_groups), responses(), responses())


def deal_step(lengths: DrawnLengths, takers: Sequence[Taker], *, cost: RowCost, is_known: bool) -> DealtStep:
    """Deal a step's groups to replicas, then its rows to ranks, where `cost` is what they get equal shares of."""
    (num_groups, group_size), prompts_G = lengths.responses_GN.shape, lengths.prompts_G
    expected = lengths.before_GN.mean(axis=1).astype(int).tolist() if is_known else None
    costs_G = GroupLengths(prompts_G.tolist(), expected).costs(cost, group_size)
    taker_of_group = deal_groups(costs_G, [-1] * num_groups, takers, seed=0, step=0)
    homes = np.array([taker.node for taker in takers])[taker_of_group].repeat(group_size)
    loads = RowLoads(np.arange(homes.size), homes, cost.of(lengths.rows))
    shares = assign_rows(loads, takers, seed=0, step=0)
    work = COST.of(lengths.rows)
    foreign = sum(int((homes[share] != taker.node).sum()) for taker, share in zip(takers, shares, strict=True))
    return DealtStep(
        generation=_sums(generation_work(lengths), taker_of_group, len(takers)),
        update=np.array([work[share].sum() for share in shares]),
        idle_share=idle_share([lengths.rows[share].tolist() for share in shares]),
        foreign_rows=foreign,
        least_foreign_rows=least_foreign_rows(loads, takers),
    )


def generation_work(lengths: DrawnLengths) -> Integers:
    """The work of each group [G]: its prompt once, and what its responses really have."""
    prompts_G = COST.of(lengths.prompts_G)
    rows_GN = COST.of(lengths.prompts_G[:, None] + lengths.responses_GN)
    work: Integers = prompts_G + (rows_GN - prompts_G[:, None]).sum(axis=1)
    return work


def least_foreign_rows(loads: RowLoads, takers: Sequence[Taker]) -> int:
    """The fewest rows that must leave their nodes so that no node's takers carry more than mean and slack."""
    nodes = np.array([taker.node for taker in takers])
    # Python integers, which these products need.
    most = int(loads.costs.sum()) * (100 + SLACK_PERCENT) // (100 * nodes.size)
    least = 0
    for node in np.unique(nodes):
        own = np.sort(loads.costs[loads.homes == node])[::-1]
        excess = int(own.sum()) - most * int((nodes == node).sum())
        if excess > 0:
            least += 1 + int(np.searchsorted(own.cumsum(), excess))
    return least


def idle_share(lengths_by_taker: Sequence[list[int]]) -> float:
    """What ranks wait in all if each micro-batch lasts as long as its costliest rank's."""
    costs_by_taker = [list(map(COST.of, lengths)) for lengths in lengths_by_taker]
    plan = partial(plan_microbatches, max_tokens=TOKENS_PER_MICROBATCH)
    counts: list[int] = []
    for lengths, costs in zip(lengths_by_taker, costs_by_taker, strict=True):
        plan(lengths, costs, agree=lambda n: counts.append(n) or n)
    agreed = max(counts)
    work = np.zeros((len(lengths_by_taker), agreed))
    for taker, (lengths, costs) in enumerate(zip(lengths_by_taker, costs_by_taker, strict=True)):
        work[taker] = [sum(costs[row] for row in rows) for rows in plan(lengths, costs, agree=lambda _: agreed)]
    return float(1 - work.mean(axis=0).sum() / work.max(axis=0).sum())


def rows_of_table(num_groups: int, group_size: int, layouts: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """A row per number of ranks and nodes, and for prompts that are seen for the first and for the second time."""
    lengths, out = draw_lengths(num_groups, group_size, seed=1), []
    for num_takers, num_nodes in layouts:
        takers = [Taker(rank, rank * num_nodes // num_takers) for rank in range(num_takers)]
        for is_known in (False, True):
            by_cost, by_rows = (deal_step(lengths, takers, cost=cost, is_known=is_known) for cost in (COST, ROWS))
            out.append(
                {
                    "ranks": num_takers,
                    "nodes": num_nodes,
                    "prompts": "seen" if is_known else "new",
                    "generation, max / mean": _unevenness(by_cost.generation),
                    "by numbers": _unevenness(by_rows.generation),
                    "update, max / mean": _unevenness(by_cost.update),
                    "update, (max - min) / mean": float(np.ptp(by_cost.update) / by_cost.update.mean()),
                    "by numbers ": _unevenness(by_rows.update),
                    "idle share": by_cost.idle_share,
                    "by numbers  ": by_rows.idle_share,
                    "cross-node rows": by_cost.foreign_rows,
                    "least possible": by_cost.least_foreign_rows,
                }
            )
    return out


def _unevenness(loads: Integers) -> float:
    return float(loads.max() / loads.mean())


def _sums(values: Integers, owners: Integers, num_owners: int) -> Integers:
    out = np.zeros(num_owners, dtype=np.int64)
    np.add.at(out, owners, values)
    return out
