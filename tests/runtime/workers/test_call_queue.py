"""Calls leave the queue in order, once each, in shares that leave work for every worker."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spmdrl.runtime.workers.call_queue import CallQueue
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
