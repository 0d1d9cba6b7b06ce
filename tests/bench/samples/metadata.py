"""What the metadata of a large job costs one of its ranks: bytes and microseconds a step.

One process plays one rank. The news of all ranks are packed as they would arrive, a message for each rank and worker
state, and this rank unpacks and observes them, answers which rows are ready, deals them to all ranks, claims and
finishes them. Nothing is sent. The bytes stand beside a closed formula for the same job.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np

from spmdrl.dataflow.samples.balancing.dealing import Dealer, DealRules, GroupLengths
from spmdrl.dataflow.samples.catalogue import RowMetadata, announced_lengths, pack_news, unpack_news
from spmdrl.dataflow.samples.row_lives import Controller, RowLives
from spmdrl.dataflow.samples.schema import columns_mask, needs_by_state
from spmdrl.nouns.batch import Integers
from spmdrl.nouns.roles import WorkerState
from spmdrl.runtime.launch import LaunchEnvironment
from tests.bench.harness.bench_table import BenchTable

SEED = 0
MAX_PROMPT_LENGTH, MAX_RESPONSE_LENGTH = 512, 8192
MEAN_ROW_BYTES = 8192
WORD_BYTES = 8
NEEDS = needs_by_state({"advantages", "old_logprobs", "ref_logprobs"})


@dataclass(frozen=True)
class AnnouncingState:
    """A worker state, and the columns that it announces."""

    name: str
    state: WorkerState
    makes: tuple[str, ...]
    whole_groups: bool = False
    """each rank has whole groups: those that it generated"""


STAGES = (
    AnnouncingState("generation", WorkerState.GENERATION, ("response_ids", "rollout_logprobs"), whole_groups=True),
    AnnouncingState("reward", WorkerState.REWARD, ("reward",), whole_groups=True),
    AnnouncingState("reference", WorkerState.REFERENCE, ("ref_logprobs",)),
    AnnouncingState("old_logprobs", WorkerState.OLD_LOGPROBS, ("old_logprobs",)),
    # A critic and a reward model would announce columns like these two, which nothing else makes here.
    AnnouncingState("values", WorkerState.OLD_LOGPROBS, ("versions",)),
    AnnouncingState("reward_model", WorkerState.REFERENCE, ("reward_verdict",)),
    AnnouncingState("advantage", WorkerState.ADVANTAGE, ("advantages",)),
    AnnouncingState("update", WorkerState.UPDATE, ()),
)
OPTIONAL_STAGES = ("reward_model", "values")


@dataclass(frozen=True)
class Job:
    """The sizes that metadata depends on."""

    num_rows: int
    num_nodes: int
    ranks_per_node: int
    group_size: int

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def rules(self) -> DealRules:
        """Those of the last rank."""
        last = self.num_ranks - 1
        launch = LaunchEnvironment(last, self.num_ranks, last % self.ranks_per_node, self.ranks_per_node)
        return DealRules(launch, SEED)


@dataclass(frozen=True)
class Cost:
    """What one state costs one rank in one step: bytes received, and microseconds for each duty."""

    received_bytes: int
    ready_us: float
    deal_us: float
    claim_us: float
    observe_us: float
    finish_us: float
    poll_us: float
    """one more question for ready rows, while nothing changes"""


DUTIES = ("ready_us", "deal_us", "claim_us", "observe_us", "finish_us")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=524288, help="responses of one step")
    parser.add_argument("--nodes", type=int, default=128)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=16, help="responses per prompt")
    parser.add_argument("--states", type=int, default=8, choices=range(6, 9), help="worker states")
    parser.add_argument("--steps", type=int, default=3, help="steps measured; the figures are medians")


def run(arguments: argparse.Namespace) -> BenchTable:
    """Measure every state of some steps, and compare the bytes with the closed formula."""
    job = Job(arguments.rows, arguments.nodes, arguments.ranks_per_node, arguments.group_size)
    left_out = OPTIONAL_STAGES[: len(STAGES) - arguments.states]
    stages = [stage for stage in STAGES if stage.name not in left_out]
    steps = [measured_step(job, stages, step) for step in range(arguments.steps)]
    costs = {stage.name: _medians([step[number] for step in steps]) for number, stage in enumerate(stages)}
    figures = {stage.name: _figures(costs[stage.name], formula_bytes(job, stage)) for stage in stages}
    total = {name: sum(of_state[name] for of_state in figures.values()) for name in figures["update"]}
    ratio = total["received_bytes"] / total["formula_bytes"]
    rows = [{"state": name, **of_state} for name, of_state in [*figures.items(), ("step", total)]]
    return BenchTable(
        title=f"bench metadata: {job.num_rows} rows, {job.num_nodes} nodes x {job.ranks_per_node} ranks, "
        f"{len(stages)} worker states; one rank, one step",
        rows=rows,
        notes=(
            f"received / closed formula = {ratio:.3f}; {total['received_bytes'] / job.num_rows:.1f} bytes per row",
            "all ranks have a prompt's metadata without a message",
        ),
        details={
            "bytes_per_rank_and_step": total["received_bytes"],
            "us_per_rank_and_step": total["sum_us"],
            "poll_us": statistics.median(cost.poll_us for cost in costs.values()),
            "ratios": {"received_vs_formula": ratio},
        },
    )


def formula_bytes(job: Job, stage: AnnouncingState) -> int:
    """Bytes of a state's metadata for one rank, uncompressed, if every rank has its share of one node's rows.

    A message is a word each for its kind, its columns, its row numbers, its one home and each announced length; then
    a row number takes as many bytes as the rows of a node need, or whole groups a word each where that is less; a
    length takes as many as the longest response needs.
    """
    if not stage.makes:
        return 0
    num_lengths = len(announced_lengths(columns_mask(stage.makes)))
    row_bytes: float = _bytes_for(job.num_rows // job.num_nodes)
    if stage.whole_groups:
        row_bytes = min(row_bytes, WORD_BYTES / job.group_size)
    per_rank = WORD_BYTES * (4 + num_lengths)
    per_row = row_bytes + num_lengths * _bytes_for(MAX_RESPONSE_LENGTH)
    received = (job.num_ranks - 1) / job.num_ranks
    return round(received * (job.num_ranks * per_rank + job.num_rows * per_row))


def _bytes_for(count: int) -> int:
    return next(width for width in (1, 2, 4) if count <= 256**width)


def measured_step(job: Job, stages: Sequence[AnnouncingState], step: int) -> list[Cost]:
    """One rank's work on metadata in one step, state by state."""
    random = np.random.default_rng((SEED, step))
    rows = np.arange(job.num_rows)
    prompts_G = random.integers(32, MAX_PROMPT_LENGTH, job.num_rows // job.group_size)
    dealer = Dealer(job.rules, step, job.group_size)
    homes_G = dealer.deal_groups(range(prompts_G.size), GroupLengths(prompts_G.tolist(), None))
    homes = np.repeat(homes_G, job.group_size)
    responses = random.lognormal(6.5, 0.8, job.num_rows).astype(np.int64).clip(1, MAX_RESPONSE_LENGTH)
    lives = RowLives(NEEDS, homes, step=step, group_size=job.group_size)
    prompts = np.repeat(prompts_G, job.group_size)
    lives.observe([RowMetadata(rows, columns_mask(["prompt_ids"]), {"prompt_ids": prompts})])
    player = _Player(job, lives, dealer, responses)
    return [player.play(stage) for stage in stages]


class _Player:
    """Plays the last rank."""

    def __init__(self, job: Job, lives: RowLives, dealer: Dealer, responses: Integers):
        self._job, self._lives, self._responses = job, lives, responses
        self._dealer = dealer
        self._generated: list[Integers] = []

    def play(self, stage: AnnouncingState) -> Cost:
        # Two states that read the same have a controller each.
        controller = Controller(stage.state, NEEDS[stage.state], self._lives.catalogue)
        ready, ready_us = _timed(controller.ready_rows)
        shares, deal_us = _timed(lambda: self._deal(stage, ready))
        _, claim_us = _timed(lambda: controller.claim(np.concatenate(shares)))
        packed = [self._pack(stage, share) for share in shares if stage.makes]
        _, observe_us = _timed(lambda: self._observe(packed))
        _, finish_us = _timed(lambda: controller.consume(ready))
        controller.ready_rows()
        _, poll_us = _timed(controller.ready_rows)
        received = sum(map(len, packed[:-1]))
        return Cost(received, ready_us, deal_us, claim_us, observe_us, finish_us, poll_us)

    def _deal(self, stage: AnnouncingState, ready: Integers) -> list[Integers]:
        """Every rank's rows."""
        if stage.state is WorkerState.GENERATION:
            self._generated = list(self._dealer.deal_generation(ready).values())
        if stage.whole_groups:
            return self._generated
        return list(self._dealer.deal(stage.state, ready, self._lives.catalogue).values())

    def _pack(self, stage: AnnouncingState, share: Integers) -> bytes:
        """A rank's news, with the places of its frames: generation stores group by group, other states at once."""
        columns = columns_mask(stage.makes)
        lengths = dict.fromkeys(announced_lengths(columns), self._responses[share])
        sizes = np.diff(np.arange(0, share.size + 1, self._job.group_size if stage.whole_groups else share.size or 1))
        frame_bytes = sizes * MEAN_ROW_BYTES
        places = np.stack([0 * sizes, frame_bytes.cumsum() - frame_bytes, frame_bytes, sizes], axis=1)
        return pack_news([RowMetadata(share, columns, lengths, places)])

    def _observe(self, packed: Sequence[bytes]) -> None:
        self._lives.observe(entry for part in packed for entry in unpack_news(part))


Result = TypeVar("Result")


def _timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """What `work` returns, and the microseconds that it took."""
    started = time.perf_counter_ns()
    result = work()
    return result, (time.perf_counter_ns() - started) / 1000


def _medians(costs: Sequence[Cost]) -> Cost:
    return Cost(
        **{field.name: statistics.median(getattr(cost, field.name) for cost in costs) for field in fields(Cost)}
    )


def _figures(cost: Cost, formula: int) -> dict[str, int]:
    duties = {name: round(getattr(cost, name)) for name in DUTIES}
    return {"received_bytes": cost.received_bytes, "formula_bytes": formula, **duties, "sum_us": sum(duties.values())}
