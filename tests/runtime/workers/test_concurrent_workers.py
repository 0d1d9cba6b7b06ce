"""A worker whose handler is a coroutine function takes calls while others wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from spmdrl.runtime.workers import process
from spmdrl.runtime.workers.call_pool import CallPool
from spmdrl.runtime.workers.call_queue import Call
from spmdrl.runtime.workers.process import PendingCall, WorkerSetup
from spmdrl.runtime.workers.strikes import Strikes, Subject
from spmdrl.runtime.workers.verdict import Verdict


class Answers:
    """Answers as they are: what the worker sent, or the verdict and the error."""

    def read(self, answer: Any, call: PendingCall, seconds: float) -> Any:
        return answer

    def failed(self, call: PendingCall, verdict: Verdict, error: str) -> Any:
        return verdict, error


def pool_of(strikes: Strikes | None = None, timeout_seconds: float = 10.0) -> CallPool[Any]:
    setup = WorkerSetup(
        "environment", "environment.function", "environment.variables", "tests.runtime.workers.rendezvous", [], [], None
    )
    return CallPool(setup, Answers(), num_workers=1, timeout_seconds=timeout_seconds, strikes=strikes)


@pytest.fixture
def pool() -> Iterator[CallPool[Any]]:
    one = pool_of()
    yield one
    one.close()


def meeting(own: str, other: str, **of_call: Any) -> Call:
    return Call(own, {"do": "meet", "own": own, "other": other}, affinity=own, **of_call)


def calls(*names: str, do: str = "nothing") -> list[Call]:
    return [Call(name, {"do": do}, affinity=name, subject=Subject(name, name)) for name in names]


def test_calls_are_answered_while_others_wait_for_a_later_one(pool):
    pool.submit([meeting("a", "c"), meeting("b", "c")])
    assert pool.wait(["a", "b"], 0.1) is None
    pool.submit(calls("free"))
    assert pool.collect(["free"])[0]["do"] == "nothing"
    pool.submit([meeting("c", "a")])
    assert [one["own"] for one in pool.collect(["b", "c", "a"])] == ["b", "c", "a"]


def test_hundreds_of_calls_wait_at_once_for_one_another(pool):
    names = [str(number) for number in range(400)]
    pool.submit([meeting(own, other) for own, other in zip(names, names[1:] + names[:1], strict=True)])
    assert [one["own"] for one in pool.collect(names)] == names


def test_a_call_has_the_time_of_the_one_that_opens_for_it(monkeypatch):
    monkeypatch.setattr(process, "_GRACE_SECONDS", 0.1)
    pool = pool_of(timeout_seconds=0.2)
    try:
        opening = Call(None, {"do": "meet", "own": "opened", "other": "opener"}, seconds=20.0)
        pool.submit([meeting("row", "opener", opening=opening)])
        assert pool.wait(["row"], 0.6) is None, "it isn't lost"
        pool.submit([meeting("opener", "opened")])
        assert [one["own"] for one in pool.collect(["row", "opener"])] == ["row", "opener"]
    finally:
        pool.close()


def test_the_death_of_a_worker_fails_all_calls_that_it_had_begun_without_blame_and_leaves_a_new_one():
    strikes = Strikes()
    pool = pool_of(strikes=strikes)
    try:
        pool.submit([meeting("a", "never"), meeting("b", "never")])
        assert pool.wait(["a"], 0.1) is None
        pool.submit(calls("killer", do="die"))
        failed = pool.collect(["a", "killer", "b"])
        assert [verdict for verdict, _ in failed] == [Verdict.CRASHED] * 3
        assert failed[0][1] == "the environment process was lost in one of 3 calls: its pipe ended, exit code 3"
        assert strikes.take_new() == [], "any of them may have been it"
        pool.submit(calls("killer", do="die"))
        assert "lost in this call" in pool.collect(["killer"])[0][1]
        assert [one.subject.name for one in strikes.take_new()] == ["killer"]
        pool.submit(calls("next"))
        assert pool.collect(["next"])[0]["do"] == "nothing"
    finally:
        pool.close()


def test_a_worker_that_answers_nothing_is_lost_for_its_late_call_and_the_others_are_made_again(monkeypatch):
    monkeypatch.setattr(process, "_GRACE_SECONDS", 0.2)
    pool = pool_of()
    try:
        pool.submit([Call("late", {"do": "block"}, seconds=0.5, limit="its limit"), *calls("other")])
        late, other = pool.collect(["late", "other"])
        assert late == (Verdict.TIMED_OUT, "the environment process was lost in this call: it was over its limit")
        assert other["do"] == "nothing"
    finally:
        pool.close()
