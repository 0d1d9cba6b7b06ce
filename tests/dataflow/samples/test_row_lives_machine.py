"""Random lives of rows on several nodes, with losses and restores: no row is lost, doubled or split from its group.

Every node has its replica of the rows' lives and observes the others' news at its own pace, in its own order and in
its own portions. A model in plain sets has what must come out.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from spmdrl.dataflow.samples.catalogue import RowDrop, RowMetadata, announced_lengths, joined, pack_news, unpack_news
from spmdrl.dataflow.samples.row_lives import RowLives, RowStatus
from spmdrl.dataflow.samples.schema import columns_mask, needs_by_state
from spmdrl.dataflow.samples.store.keeping import restored, snapshot
from spmdrl.nouns.batch import WorkerState

GROUP_SIZE, NUM_GROUPS, STEP = 2, 3, 7
ROWS = range(GROUP_SIZE * NUM_GROUPS)
NEEDS = needs_by_state({"advantages", "ref_logprobs"})
MADE = {
    WorkerState.GENERATION: ("response_ids", "rollout_logprobs"),
    WorkerState.REWARD: ("reward",),
    WorkerState.REFERENCE: ("ref_logprobs",),
    WorkerState.ADVANTAGE: ("advantages",),
    WorkerState.UPDATE: (),
}
REASONS = ("too long", "no reward", "broken")

seeds = st.integers(0, 2**32)


@dataclass
class Truth:
    """What must be so once every replica has received all news."""

    homes: list[int] = field(default_factory=list)
    """by group"""
    columns: dict[int, set[str]] = field(default_factory=lambda: {row: set() for row in ROWS})
    dropped: dict[int, str] = field(default_factory=dict)
    claimed: dict[WorkerState, dict[int, int]] = field(default_factory=lambda: {state: {} for state in MADE})
    """by row the node that holds it"""
    done: dict[WorkerState, set[int]] = field(default_factory=lambda: {state: set() for state in MADE})
    payload: dict[int, dict[tuple[int, str], str]] = field(default_factory=dict)
    """by node what its warehouse holds: (row, column) -> value"""

    def home(self, row: int) -> int:
        return self.homes[row // GROUP_SIZE]

    def ready(self, state: WorkerState) -> list[int]:
        taken = self.done[state] | self.claimed[state].keys() | self.dropped.keys()
        return [row for row in ROWS if NEEDS[state] <= self.columns[row] and row not in taken]

    def trained(self) -> set[int]:
        return self.done[WorkerState.UPDATE]


class Nodes(RuleBasedStateMachine):
    """Absent -> put prompts -> take, put, release, finish by state -> trained; drop, save, loss and restore anytime."""

    @initialize(num_nodes=st.integers(1, 3), seed=seeds)
    def start(self, num_nodes: int, seed: int) -> None:
        self.truth = Truth([Random(seed + group).randrange(num_nodes) for group in range(NUM_GROUPS)])
        homes = np.array(self.truth.homes).repeat(GROUP_SIZE)
        self.replicas = [RowLives(NEEDS, homes, step=STEP, group_size=GROUP_SIZE) for _ in range(num_nodes)]
        self.begin_hearing()
        self.put_prompts(seed)
        self.work(seed)
        self.save()

    def begin_hearing(self) -> None:
        nodes = range(len(self.replicas))
        self.sent: list[list[RowMetadata | RowDrop]] = [[] for _ in nodes]
        """by writer"""
        self.received = [[0 for _ in nodes] for _ in nodes]
        """by replica and writer how many of its news it has received"""
        self.half_made: set[WorkerState] = set()
        """states that put columns since they last finished"""
        for node in nodes:
            self.truth.payload.setdefault(node, {})

    def announce_columns(self, writer: int, rows: list[int], names: tuple[str, ...]) -> None:
        """Store columns in the rows' home and announce them."""
        index, mask = np.array(rows, dtype=np.int64), columns_mask(names)
        lengths = dict.fromkeys(announced_lengths(mask), index + 10)
        for row in rows:
            assert not self.truth.columns[row].intersection(names), "a column is made once"
            self.truth.columns[row].update(names)
            self.truth.payload[self.truth.home(row)].update({(row, name): f"{name} of {row}" for name in names})
        self.sent[writer].append(RowMetadata(index, mask, lengths))

    def groups_without_prompts(self) -> list[int]:
        return [group for group in range(NUM_GROUPS) if not self.truth.columns[group * GROUP_SIZE]]

    @rule(seed=seeds)
    def put_prompts(self, seed: int) -> None:
        random = Random(seed)
        unborn = self.groups_without_prompts()
        for group in random.sample(unborn, random.randint(len(unborn) // 2, len(unborn))):
            rows = [row for row in ROWS if row // GROUP_SIZE == group]
            self.announce_columns(random.randrange(len(self.replicas)), rows, ("prompt_ids",))

    @rule(seed=seeds, reason=st.sampled_from(REASONS))
    def drop(self, seed: int, reason: str) -> None:
        random = Random(seed)
        rows = [row for row in ROWS if random.random() < 0.1]
        for row in rows:
            self.truth.dropped[row] = min(reason, self.truth.dropped.get(row, reason))
        self.sent[random.randrange(len(self.replicas))].append(RowDrop(np.array(rows, dtype=np.int64), reason))

    @rule(seed=seeds)
    def hear_some(self, seed: int) -> None:
        random = Random(seed)
        for replica in range(len(self.replicas)):
            for writer in random.sample(range(len(self.sent)), len(self.sent)):
                left = len(self.sent[writer]) - self.received[replica][writer]
                self.receive(replica, writer, random.randint(0, left))

    def receive(self, replica: int, writer: int, count: int) -> None:
        start = self.received[replica][writer]
        news = self.sent[writer][start : start + count]
        packed = pack_news(joined(news) if count % 2 else news)
        self.replicas[replica].observe(unpack_news(packed))
        self.received[replica][writer] += count

    def receive_all(self, random: Random) -> None:
        """What a commit does."""
        for replica in range(len(self.replicas)):
            for writer in random.sample(range(len(self.sent)), len(self.sent)):
                self.receive(replica, writer, len(self.sent[writer]) - self.received[replica][writer])

    @rule(seed=seeds)
    def work(self, seed: int) -> None:
        """Some stages, one behind the other."""
        random = Random(seed)
        for _ in range(random.randint(1, 6)):
            self.take_some(random)
            self.commit_a_state(random)
        self.take_some(random)
        self.check()

    @rule(seed=seeds)
    def take(self, seed: int) -> None:
        self.take_some(Random(seed))
        self.check()

    def take_some(self, random: Random) -> None:
        self.receive_all(random)
        state = random.choice([state for state in MADE if self.truth.ready(state)] or list(MADE))
        ready = self.truth.ready(state)
        rows = random.sample(ready, random.randint(len(ready) // 2, len(ready)))
        for replica in self.replicas:
            replica.claim(state, rows)
        for row in rows:
            self.truth.claimed[state][row] = random.randrange(len(self.replicas))

    def unmade(self, state: WorkerState) -> list[int]:
        """Rows that are claimed for a state, but don't have its columns yet."""
        return [row for row in self.truth.claimed[state] if not self.truth.columns[row].intersection(MADE[state])]

    def a_busy_state(self, random: Random) -> WorkerState:
        return random.choice([state for state in MADE if self.truth.claimed[state]] or list(MADE))

    @rule(seed=seeds)
    def put(self, seed: int) -> None:
        random = Random(seed)
        self.put_some(self.a_busy_state(random), random)

    def put_some(self, state: WorkerState, random: Random) -> None:
        for node in range(len(self.replicas)):
            mine = [row for row in self.unmade(state) if self.truth.claimed[state][row] == node]
            rows = random.sample(mine, random.randint(len(mine) // 2, len(mine)))
            if rows and MADE[state]:
                self.announce_columns(node, rows, MADE[state])
                self.half_made.add(state)

    def commit_a_state(self, random: Random) -> None:
        """End a state's claims: what it couldn't make of its rows is dropped, the rest is its for good."""
        state = self.a_busy_state(random)
        for _ in range(random.randint(1, 3)):
            self.put_some(state, random)
        failed = self.unmade(state) if MADE[state] else []
        self.sent[0].append(RowDrop(np.array(failed, dtype=np.int64), "failed"))
        self.truth.dropped |= {row: min("failed", self.truth.dropped.get(row, "failed")) for row in failed}
        self.finish(state, random)

    def finish(self, state: WorkerState, random: Random) -> None:
        """All replicas end a state's claims; whether they observe its columns before or after makes no difference."""
        for replica in range(len(self.replicas)):
            for writer in range(len(self.sent)):
                left = len(self.sent[writer]) - self.received[replica][writer]
                self.receive(replica, writer, random.randint(0, left))
            self.replicas[replica].finish(state)
        rows = self.truth.claimed[state].keys()
        assert self.truth.trained().isdisjoint(rows) or state is not WorkerState.UPDATE, "a row is trained once"
        self.truth.done[state] |= rows
        self.truth.claimed[state] = {}
        self.half_made.discard(state)

    @precondition(lambda self: not self.half_made)
    @rule()
    def save(self) -> None:
        self.receive_all(Random(0))
        self.check()
        snapshots = [snapshot(replica) for replica in self.replicas]
        for other in snapshots[1:]:
            assert other.keys() == snapshots[0].keys()
            assert all(np.array_equal(other[key], array) for key, array in snapshots[0].items())
        self.saved = snapshots[0]
        self.saved_truth = copy.deepcopy(self.truth)

    @rule(num_nodes=st.integers(1, 4), seed=seeds)
    def lose_a_node_and_restore(self, num_nodes: int, seed: int) -> None:
        """All go back to the last save, on as many nodes as there are; what was said since is gone."""
        homes_G = np.array([Random(seed + group).randrange(num_nodes) for group in range(NUM_GROUPS)])
        self.truth = copy.deepcopy(self.saved_truth)
        self.truth.claimed = {state: {} for state in MADE}
        self.truth.homes = homes_G.tolist()
        contents = {key: value for held in self.truth.payload.values() for key, value in held.items()}
        self.truth.payload = {node: {} for node in range(num_nodes)}
        for (row, name), value in contents.items():
            self.truth.payload[self.truth.home(row)][row, name] = value
        homes = homes_G.repeat(GROUP_SIZE)
        self.replicas = [
            restored(self.saved, RowLives(NEEDS, homes, step=STEP, group_size=GROUP_SIZE)) for _ in range(num_nodes)
        ]
        self.begin_hearing()
        self.check()

    @invariant()
    def every_replica_finds_each_row_in_one_place(self) -> None:
        for replica in getattr(self, "replicas", ()):
            places = [replica.trained_rows(), replica.dropped_rows(), replica.pending_rows()]
            assert sorted(np.concatenate(places).tolist()) == list(ROWS)
            account = replica.account()
            counts = [account.num_trained, sum(account.num_dropped.values()), account.num_pending]
            assert counts == [rows.size for rows in places]

    def check(self) -> None:
        """All replicas agree with the truth."""
        for replica in self.replicas:
            self.check_facts(replica)
            self.check_claims(replica)

    def check_facts(self, replica: RowLives) -> None:
        truth, catalogue = self.truth, replica.catalogue
        assert catalogue.homes.tolist() == [truth.home(row) for row in ROWS]
        assert catalogue.columns.tolist() == [columns_mask(truth.columns[row]) for row in ROWS]
        for name in ("response_ids", "advantages"):
            expected = [row + 10 if name in truth.columns[row] else -1 for row in ROWS]
            assert catalogue.lengths(name).tolist() == expected
        for node, held in truth.payload.items():
            here = {(row, name) for row in ROWS for name in truth.columns[row] if catalogue.homes[row] == node}
            assert held == {(row, name): f"{name} of {row}" for row, name in here}

    def check_claims(self, replica: RowLives) -> None:
        truth = self.truth
        for state in MADE:
            controller = replica.controllers[state]
            assert controller.ready_rows().tolist() == truth.ready(state)
            assert controller.rows_with(RowStatus.CLAIMED).tolist() == sorted(truth.claimed[state])
            assert controller.rows_with(RowStatus.CONSUMED).tolist() == sorted(truth.done[state])
        assert replica.trained_rows().tolist() == sorted(truth.trained())
        lost = {row: reason for row, reason in truth.dropped.items() if row not in truth.trained()}
        assert replica.dropped_rows().tolist() == sorted(lost)
        counts = {reason: list(lost.values()).count(reason) for reason in lost.values()}
        assert replica.account().num_dropped == counts

    def teardown(self) -> None:
        """Go on to the end of the step: every row is trained once or dropped."""
        if not hasattr(self, "replicas"):
            return
        random = Random(0)
        for group in self.groups_without_prompts():
            self.announce_columns(0, [row for row in ROWS if row // GROUP_SIZE == group], ("prompt_ids",))
        self.receive_all(random)
        for state in MADE:
            for replica in self.replicas:
                replica.claim(state, replica.controllers[state].ready_rows())
            self.truth.claimed[state] |= dict.fromkeys(self.truth.ready(state), 0)
            if MADE[state] and self.unmade(state):
                self.announce_columns(0, self.unmade(state), MADE[state])
            self.finish(state, random)
            self.receive_all(random)
        self.check()
        accounts = [replica.settled() for replica in self.replicas]
        assert all(account == accounts[0] for account in accounts)
        assert accounts[0].num_trained == len(ROWS) - len(self.truth.dropped.keys() - self.truth.trained())


@pytest.mark.parametrize(
    "num_sequences", [100, pytest.param(int(os.environ.get("SPMDRL_SEQUENCES", "500")), marks=pytest.mark.slow)]
)
def test_no_row_is_lost_doubled_or_split_in_random_sequences(num_sequences: int):
    few_steps = settings(
        max_examples=num_sequences,
        stateful_step_count=8,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    run_state_machine_as_test(Nodes, settings=few_steps)
