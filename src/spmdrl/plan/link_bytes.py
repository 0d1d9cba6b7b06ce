"""Bytes of a step's sample flow over each kind of link, counted as the dock counts them, without a job.

The run's own code deals planned rows to ranks; each state's puts and gets follow from the ranks' shares.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from spmdrl.dataflow.data.prompts import Prompt
from spmdrl.dataflow.resharding.planning.slice_layouts import parameter_table
from spmdrl.dataflow.samples.balancing.dealing import DealRules, RowGroups, Shares
from spmdrl.dataflow.samples.catalogue import RowMetadata, announced_lengths, pack_news
from spmdrl.dataflow.samples.schema import LENGTHS_OF, PROMPT_COLUMNS, SCORE_COLUMNS, columns_mask, rule_of
from spmdrl.dataflow.samples.step_rows import StepRows
from spmdrl.dataflow.samples.volume import Link, Volume
from spmdrl.dataflow.stages.rollout.portions import rows_until
from spmdrl.dataflow.stages.rows import ROUTED_EXPERTS, TURN_REWARDS, TURNS
from spmdrl.dataflow.stages.schedule import Slot
from spmdrl.dataflow.stages.update_report import chosen_places
from spmdrl.engines.models.decoder import DecoderConfig, row_cost_of
from spmdrl.engines.training.routers import sparse_layers
from spmdrl.job.rollouts.samples_report import COLUMNS
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.nouns.batch import Integers, WorkerState
from spmdrl.nouns.partition import ROWS
from spmdrl.plan.resharding_bytes import generation_layout
from spmdrl.resources.mesh import Axis, copies_of_model, replicas_of
from spmdrl.runtime.launch import LaunchEnvironment

_OFFSET_BYTES = 8
# The deal of fewer rows depends on which of them are long.
_ENOUGH_ROWS, _MOST_STEPS = 4096, 32


@dataclass(frozen=True)
class PlannedLengths:
    """Mean lengths of a step's rows, in tokens."""

    prompt: float
    response: float
    """all tokens after the prompt, an environment's too"""

    def of_rows(self, num_groups: int, group_size: int, longest: int, seed: int) -> tuple[Integers, Integers]:
        """Return lengths of prompts [G] and responses [B] with these means.

        Responses end after each token with the same probability, and at the `longest` at the latest.
        """
        prompts, responses = np.full(num_groups, self.prompt), _spread(self.response, num_groups * group_size, longest)
        return _whole(prompts), np.random.default_rng(seed).permutation(_whole(responses))


def _spread(mean: float, number: int, longest: int) -> np.ndarray:
    """Return the quantiles of min(geometric, `longest`) with this mean, scaled to have it exactly."""
    if mean >= longest or mean <= 1 or number == 0:
        return np.full(number, mean)
    low, high = 1e-9, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 - (1 - middle) ** longest) / middle > mean else (low, middle)
    quantiles = np.log1p(-(np.arange(number) + 0.5) / number) / np.log1p(-low)
    lengths = np.minimum(np.ceil(quantiles), longest)
    return lengths * (mean / lengths.mean())


def _whole(lengths: np.ndarray) -> Integers:
    """Return whole lengths with the same sum but for a half."""
    ends = np.round(lengths.cumsum()).astype(np.int64)
    return np.maximum(np.diff(ends, prepend=0), 1)


@dataclass(frozen=True)
class PlannedVolume:
    """Sample flow of one step."""

    volume: Volume
    """bytes of all ranks together"""
    host_seconds: float
    """time of a rank's controllers for all rows, as it took here"""


def sample_flow_bytes(
    checked: CheckedRun, decoder: DecoderConfig, launch: LaunchEnvironment, lengths: PlannedLengths
) -> PlannedVolume:
    """Return what all ranks together put and get in one step of `train`; `decoder` is the policy's.

    Rows that cross nodes follow from the run's deal of rows of planned lengths, on average over several steps of few
    rows. All rows are generated at once and trained on. Metadata has no places in memory.
    """
    rollout, flow = checked.config.rollout, PlannedFlow(checked, decoder, launch)
    sizes = rollout.prompts_per_step, rollout.num_generations, rollout.max_completion_length
    num_steps = min(1 + _ENOUGH_ROWS // (rollout.prompts_per_step * rollout.num_generations), _MOST_STEPS)
    steps = [PlannedStep(flow, *lengths.of_rows(*sizes, seed=one), step=one) for one in range(1, 1 + num_steps)]
    volumes = [step.volume for step in steps]
    metadata_bytes = round(sum(one.metadata_bytes for one in volumes) / num_steps)
    mean = Volume(_mean([one.put_bytes for one in volumes]), _mean([one.get_bytes for one in volumes]), metadata_bytes)
    return PlannedVolume(mean, sum(step.host_seconds for step in steps) / num_steps)


def _mean(found: Sequence[Mapping[Link, Counter[str]]]) -> dict[Link, Counter[str]]:
    sums = {link: sum((one[link] for one in found), Counter[str]()) for link in Link}
    return {link: Counter({name: round(total / len(found)) for name, total in sums[link].items()}) for link in Link}


class PlannedFlow:
    """Sample flow of a run that is only planned."""

    def __init__(self, checked: CheckedRun, decoder: DecoderConfig, launch: LaunchEnvironment):
        """`decoder` is the policy's."""
        self.checked = checked
        self.decoder = decoder
        self.members = _members(checked, decoder, launch)
        self.rules = _deal_rules(checked, decoder, launch, self.members)


class PlannedStep:
    """One step of rows whose prompts [G] and responses [B] have these lengths; `expected_G` as in `StepRows`."""

    def __init__(
        self, flow: PlannedFlow, prompts_G: Integers, responses_B: Integers, *, step: int,
        expected_G: Sequence[int] | None = None,
    ):  # fmt: skip
        self.volume = Volume()
        self.host_seconds = 0.0
        """time of one rank's controllers"""
        self._config = flow.checked.config
        self._launch = flow.rules.launch
        self._members = flow.members
        size = self._config.rollout.num_generations
        prompts = [Prompt(str(number), range(length), "", None, {}, "") for number, length in enumerate(prompts_G)]
        self.rows = StepRows(flow.checked.needs, flow.rules, step, prompts, size, expected_G=expected_G)
        self._homes = self.rows.lives.catalogue.homes
        self._writers: dict[str, Integers] = {}
        """rank in whose memory each row of a column lies [B]"""
        self._num_values = _num_values(flow.checked, flow.decoder, prompts_G.repeat(size), responses_B)
        has_turns, scores = self._config.environment.key is not None, any(one.work == "score" for one in flow.members)
        self._has_portions = has_turns and scores and not flow.checked.algorithm.max_refills and not flow.rules.others
        # Groups whose longest responses end together are put together.
        self._ends_B = responses_B.reshape(-1, size).max(axis=1).repeat(size)
        for slot in flow.checked.slots:
            self._run(slot)

    def _run(self, slot: Slot) -> None:
        """Take, put and commit the rows of one state; models may score them in portions."""
        state, rows, reads, makes = slot.state, self.rows, slot.reads, {*slot.makes}
        if state is WorkerState.GENERATION:
            reads = frozenset()
            # An environment's rows always have both.
            makes |= {TURNS, TURN_REWARDS} if self._config.environment.key is not None else set()
        elif state is WorkerState.REWARD:
            reads = frozenset(SCORE_COLUMNS[part] for part in self._config.reward.parts_beside)
        elif state is WorkerState.CRITIC_UPDATE:
            reads -= {"advantages"}
        for among in rows.ready_portions(state) if state.work == "score" else (None,):
            with self._at_work():
                self._claim(state, among)
            for rank, own in self._readers(state).items():
                self._get(rank, own, sorted(reads))
            if makes:
                self._put_all(state, sorted(makes))
            with self._at_work():
                rows.lives.finish(state)
        if state is WorkerState.UPDATE:
            self._show()

    def _claim(self, state: WorkerState, among: Integers | None) -> None:
        if state is WorkerState.GENERATION:
            self.rows.deal_generation()
            if self._has_portions:
                self._cut_portions()
        elif state is WorkerState.REWARD:
            self.rows.take_generated(state)
        else:
            self.rows.deal(state, among)

    def _cut_portions(self) -> None:
        """Let each rank's rows be put and scored in portions, the shortest first."""
        number, lengths_B = self._config.dock.portions, self._num_values["response_ids"]
        for rows in self.rows.shares[WorkerState.GENERATION].values():
            ended = rows[np.argsort(lengths_B[rows], kind="stable")]
            stops = [rows_until(portion, number, rows.size) for portion in range(number)]
            self._ends_B[ended] = np.searchsorted(stops, np.arange(rows.size), side="right")
        self.rows.portions += [np.flatnonzero(self._ends_B == portion) for portion in range(number - 1)]

    def _readers(self, state: WorkerState) -> Shares:
        """Return the rows that each rank reads: all ranks of a group that are beside them, else the first alone."""
        shares, out = self.rows.shares[state], dict[int, Integers]()
        members = {ranks[0]: ranks for ranks in self._members.get(state, ())}
        for rank, rows in shares.items():
            group = members.get(rank, [rank])
            nodes = {self._launch.node_of(one) for one in group}
            is_beside = len(nodes) == 1 and nodes.issuperset(self._homes[rows].tolist())
            out |= dict.fromkeys(group if is_beside else [rank], rows)
        return out

    def _get(self, rank: int, rows: Integers, names: Iterable[str]) -> None:
        """Count the columns of these rows that a rank reads in place, or gets from each other node in one message."""
        is_here = self._homes[rows] == self._launch.node_of(rank)
        num_messages = np.unique(self._homes[rows[~is_here]]).size
        for name in names:
            bytes_B, is_kept = self._bytes(name, rows), name in PROMPT_COLUMNS
            is_own = is_here & (is_kept | (self._writers.get(name, self._homes)[rows] == rank))
            counts = self.volume.get_bytes
            self._count(counts[Link.PROCESS], name, bytes_B[is_own])
            self._count(counts[Link.NODE], name, bytes_B[is_here & ~is_own])
            # Every rank has the prompts of rows elsewhere too, which the dock doesn't count.
            if not (is_kept and self._config.dock.locality):
                self._count(counts[Link.CROSS_NODE], name, bytes_B[~is_here], num_messages)

    def _put_all(self, state: WorkerState, names: Sequence[str]) -> None:
        """Count the columns that the first rank of each group puts, and announce them."""
        for rank, rows in self.rows.shares[state].items():
            for name in names:
                self._put(rank, rows, name, is_streamed=state is WorkerState.GENERATION)
        # Lengths of one column stand for all that share them.
        mask, put = columns_mask(names), np.concatenate([*self.rows.shares[state].values()])
        lengths = {name: self._num_values[name][put] for name in announced_lengths(mask)}
        news = [RowMetadata(put, mask, lengths)]
        # Every rank receives the news of all rows that others put.
        self.volume.metadata_bytes += len(pack_news(news)) * (self._launch.world_size - 1)
        with self._at_work():
            self.rows.lives.observe(news)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        # Of the processor, which other programs here may share.
        started = time.thread_time()
        yield
        self.host_seconds += time.thread_time() - started

    def _put(self, rank: int, rows: Integers, name: str, *, is_streamed: bool) -> None:
        """Count a column, put in a batch for each home, and each end if rows are put as they come."""
        homes, bytes_B = self._homes[rows], self._bytes(name, rows)
        is_here = homes == self._launch.node_of(rank)
        for link, is_there in ((Link.PROCESS, is_here), (Link.CROSS_NODE, ~is_here)):
            batches = np.stack([homes, self._ends_B[rows] * is_streamed])[:, is_there]
            num_batches = np.unique(batches, axis=1).shape[1]
            self._count(self.volume.put_bytes[link], name, bytes_B[is_there], num_batches)
        writers = self._writers.setdefault(name, np.zeros(self.rows.num_rows, dtype=np.int64))
        # The first rank of another node stores what comes there.
        writers[rows] = np.where(is_here, rank, homes * self._launch.local_world_size)

    def _show(self) -> None:
        """Count what the main rank reads for its report of some rows."""
        wanted = self._config.log.samples_per_step
        rows = np.array(chosen_places(self.rows.num_rows, wanted, self.rows.group_size), dtype=np.int64)
        turns = self.rows.reads(WorkerState.UPDATE) & {TURNS}
        self._get(0, rows, [*COLUMNS, "advantages", *turns])

    def _bytes(self, name: str, rows: Integers) -> Integers:
        """Return bytes of rows, one offset each included."""
        offset = 0 if LENGTHS_OF[name] is None else _OFFSET_BYTES
        return self._num_values[name][rows] * rule_of(name).column.dtype.itemsize + offset

    def _count(self, counts: Counter[str], name: str, bytes_B: Integers, num_batches: int = 0) -> None:
        """Count rows of a column in several batches, each with an offset more than it has rows."""
        ends = 0 if LENGTHS_OF[name] is None else num_batches * _OFFSET_BYTES
        if bytes_B.size:
            counts[name] += int(bytes_B.sum()) + ends


def _num_values(
    checked: CheckedRun, decoder: DecoderConfig, prompts_B: Integers, responses_B: Integers
) -> Mapping[str, Integers]:
    """Return the numbers of values of each row [B], by column of any state."""
    one, num_likeliest = np.ones_like(responses_B), checked.algorithm.num_likeliest
    found = {
        "prompt_ids": prompts_B,
        "reward_parts": one * len(checked.config.reward.names),
        "teacher_top_ids": responses_B * num_likeliest,
        "teacher_top_logprobs": responses_B * (num_likeliest + 1),
    }
    if decoder.moe is not None:
        choices = len(sparse_layers(decoder)) * decoder.moe.experts_per_token
        found[ROUTED_EXPERTS] = (prompts_B + responses_B - 1) * choices
    kinds = {None: one, "response_ids": responses_B}
    return {name: found.get(name, kinds.get(lengths, one)) for name, lengths in LENGTHS_OF.items()}


Members = Mapping[WorkerState, Sequence[Sequence[int]]]
"""Ranks that work on the same rows, by state."""


def _members(checked: CheckedRun, decoder: DecoderConfig, launch: LaunchEnvironment) -> Members:
    layout = generation_layout(checked, parameter_table(decoder), launch, "cpu")
    members: dict[WorkerState, Sequence[Sequence[int]]] = {
        slot.state: copies_of_model(checked.layout_of(slot.role)).tolist()
        for slot in checked.slots
        if slot.state.uses_training_engine and slot.role is not None
    }
    if WorkerState.JUDGE in checked.needs:
        members[WorkerState.JUDGE] = replicas_of(checked.judge_layout, range(launch.world_size))
    return members | {WorkerState.GENERATION: replicas_of(layout, checked.sets_of(launch.world_size)[1])}


def _deal_rules(checked: CheckedRun, decoder: DecoderConfig, launch: LaunchEnvironment, members: Members) -> DealRules:
    """Return the rules of the run's dock."""
    config, (updating, generating) = checked.config, checked.sets_of(launch.world_size)
    by_rows = config.dock.balance == "rows"
    is_ring = checked.layout.context > 1 and checked.layout.context_kind == "ring"
    groups = {
        # The axis is that of some rank: leaders alone take rows.
        state: RowGroups(tuple(ranks[0] for ranks in of_state), Axis("rows", 1, 0, None, tuple(of_state[0])))
        for state, of_state in members.items()
    }
    return DealRules(
        launch, config.seed, ROWS if by_rows else row_cost_of(decoder), config.dock.locality, groups,
        frozenset([WorkerState.UPDATE] if checked.algorithm.unit_size > 1 else []),
        shares_prompts=config.train.share_prompts and not is_ring and not by_rows,
        others=updating if updating != generating else None,
    )  # fmt: skip
