"""Calls leave the queue in order, once each, in shares that leave work for every worker."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from spmdrl.runtime.workers.call_queue import Call, CallQueue, PinnedCalls
from spmdrl.runtime.workers.process import PendingCall


def calls_of(keys) -> list[PendingCall]:
    return [PendingCall(key, "", b"", 1, 1.0) for key in keys]


@given(st.lists(st.integers(0, 40), max_size=4), st.integers(1, 5))
def test_all_calls_leave_in_order_in_shares_of_one_submission(sizes, num_workers):
    queue, submissions = CallQueue(), []
    for number, size in enumerate(sizes):
        submissions.append([(number, at) for at in range(size)])
        queue.add(calls_of(submissions[-1]))
    shares = []
    while queue:
        shares.append([call.key for call in queue.take(num_workers)])
    assert [key for share in shares for key in share] == [key for keys in submissions for key in keys]
    assert all(share and len({number for number, _ in share}) == 1 for share in shares)


def test_one_worker_gets_all_and_several_get_ever_smaller_shares():
    alone, several = CallQueue(), CallQueue()
    for queue in (alone, several):
        queue.add(calls_of(range(20)))
    assert len(alone.take(1)) == 20
    sizes = []
    while several:
        sizes.append(len(several.take(2)))
    assert sizes == [5, 4, 3, 2, 2, 1, 1, 1, 1]


def test_what_is_put_back_goes_first():
    queue = CallQueue()
    queue.add(calls_of(["a", "b"]))
    queue.add(calls_of(["c"]))
    taken = queue.take(1)
    queue.put_back(taken[1:])
    queue.put_back([])
    assert [call.key for call in (*queue.take(1), *queue.take(1))] == ["b", "c"]
    assert not queue


@dataclass(eq=False)
class Worker:
    """A worker's queues."""

    begun: list[PendingCall] = field(default_factory=list)
    pinned: deque[PendingCall] = field(default_factory=deque)

    @property
    def unanswered(self) -> list[PendingCall]:
        return [*self.begun, *self.pinned]


def step(row: int, number: int = 0) -> PendingCall:
    opening = Call(None, {"open": row})
    return Call((row, number), {}, affinity=row, opening=opening).pending(1.0, "the limit")


def last(row: int) -> PendingCall:
    return Call(None, {}, affinity=row).pending(1.0, "the limit")


def keys(worker: Worker) -> list[object]:
    return [call.key or ("last" if call.is_last else "opening") for call in worker.pinned]


def test_calls_of_an_affinity_go_to_one_worker_in_order_behind_one_that_opens_it():
    queue, workers = PinnedCalls(), [Worker(), Worker()]
    queue.add([step(1), step(2), step(1, 1), step(3), last(1), step(4)])
    assert queue
    queue.pass_on(workers)
    assert not queue and keys(workers[0]) == ["opening", (1, 0), (1, 1), "opening", (3, 0), "last", "opening", (4, 0)]
    assert keys(workers[1]) == ["opening", (2, 0)]
    assert queue.owes_last(workers)
    queue.add([step(1, 2), last(9)])
    queue.pass_on(workers)
    assert len(keys(workers[0])) == 8, "the other one has fewer rows, and what has no worker needs no last call"
    assert keys(workers[1])[2:] == ["opening", (1, 2)]


def test_calls_of_a_lost_worker_are_opened_elsewhere():
    queue, lost, other = PinnedCalls(), Worker(), Worker()
    queue.add([step(1), step(2), last(2)])
    queue.pass_on([lost])
    queue.add([step(3)])
    # It has begun to answer, and has a call that any worker may take.
    failed = step(4)
    lost.begun.extend([lost.pinned.popleft(), lost.pinned.popleft(), failed, *calls_of(["free"])])
    assert [call.key for call in queue.take_back(lost, [failed])] == ["free"]
    queue.pass_on([other])
    assert keys(other) == ["opening", (1, 0), "opening", (2, 0), "opening", (3, 0)]
    assert not queue.owes_last([other])
