"""What follows from the board: who holds a job up, that all are to stop, or that one has failed."""

from __future__ import annotations

import subprocess
import threading
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from spmdrl.runtime.supervision import watch as watch_module
from spmdrl.runtime.supervision.activity import activity
from spmdrl.runtime.supervision.board import Board, Hang, Line, RankState, Stop, decide
from spmdrl.runtime.supervision.ending import FirstFailure
from spmdrl.runtime.supervision.first_failure import publish
from spmdrl.runtime.supervision.watch import Watch, WatchConfig

LIMIT = 10.0
FAILURE = FirstFailure(1, "ValueError: x")


def state(rank: int, idle: float = 0.0, *, waits: bool = False, boundaries: int = 5) -> RankState:
    return RankState(rank, "update", 3, boundaries, idle, "barrier" if waits else "", "at x.py:1")


def board_of(states: list[RankState], own: int = 0, **others) -> Board:
    return Board(states[own], LIMIT, lines={one.rank: Line(1, one) for one in states}, **others)


SECONDS = st.sampled_from([0.0, 1.0, 4.0, 9.0, 11.0, 100.0])
RANKS = st.integers(1, 5).flatmap(
    lambda size: st.tuples(
        st.tuples(*(
            st.builds(state, st.just(rank), SECONDS, waits=st.booleans(), boundaries=st.integers(4, 6))
            for rank in range(size)
        )),
        st.dictionaries(st.integers(min(1, size - 1), size - 1), SECONDS) if size > 1 else st.just({}),
    )
)  # fmt: skip


@given(RANKS, st.none() | st.just(FAILURE))
def test_only_ranks_that_are_silent_or_without_progress_for_too_long_are_named(ranks, failure):
    states, silent = ranks
    verdict = decide(board_of(list(states), silent=silent, failure=failure))
    mute = {rank for rank, seconds in silent.items() if seconds > LIMIT and failure is None}
    stuck = {one.rank for one in states if one.idle_seconds > LIMIT}
    if isinstance(verdict, Hang):
        assert set(verdict.ranks) <= (mute or stuck) and verdict.ranks
    else:
        assert not mute and verdict == failure


@given(RANKS)
def test_where_all_answer_a_rank_that_stands_still_by_itself_is_named_however_long_others_wait(ranks):
    states, _ = ranks
    own = [one.rank for one in states if one.idle_seconds > LIMIT and not one.collective]
    all_wait = all(one.idle_seconds > LIMIT and one.collective for one in states)
    verdict = decide(board_of(list(states)))
    assert (verdict.ranks if isinstance(verdict, Hang) else []) == own or all_wait
    assert isinstance(verdict, Hang) == bool(own or all_wait)


@given(RANKS, st.integers(0, 4), st.none() | st.just(FAILURE))
def test_a_request_of_any_rank_stops_all_and_comes_before_the_failures_that_it_causes(ranks, asked, failure):
    healthy = [replace(one, idle_seconds=0.0) for one in ranks[0]]
    board, rank = board_of(healthy, failure=failure), min(asked, len(healthy) - 1)
    lines = board.lines | {rank: replace(board.lines[rank], asked="SIGTERM", has_left=True)}
    assert decide(replace(board, lines=lines)) == Stop(f"SIGTERM (rank {rank})")


@pytest.mark.parametrize("verdict", [Stop("SIGTERM (rank 2)"), FAILURE, Hang([2], "rank 2 hangs"), None])
def test_other_ranks_follow_rank_0_which_writes_what_they_read(verdict):
    line = Line.from_json(Line(7, state(0, waits=True), verdict=verdict).to_json())
    assert line == Line(7, state(0, waits=True), verdict=verdict)
    # Rank 0 alone knows all lines: to this one it looks as if nobody had got on.
    assert decide(Board(state(1, 99.0), LIMIT, lines={0: line})) == verdict


def test_a_rank_names_rank_0_where_it_is_silent_and_itself_alone_where_that_has_ended():
    lines = {0: Line(1, state(0))}
    assert decide(Board(state(1, 99.0), LIMIT, 1.0, lines, {0: LIMIT + 0.5})) is None
    assert decide(Board(state(1, 0.0), LIMIT, 1.0, lines, {0: LIMIT + 1.5})) == Hang([0])
    patient = {0: Line(1, replace(state(0), patience=3.0))}
    assert decide(Board(state(1, 0.0), LIMIT, 1.0, patient, {0: LIMIT + 1.5})) is None
    assert decide(Board(state(1, 99.0, waits=True), LIMIT, lines=lines, is_alone=True)) == Hang([1])
    assert decide(Board(state(1, 1.0), LIMIT, lines=lines, silent={0: 99.0}, is_alone=True)) is None


def test_without_a_limit_nothing_hangs():
    assert decide(replace(board_of([state(0, 1e9), state(1, 1e9)], silent={1: 1e9}), limit_seconds=0.0)) is None


def test_a_rank_that_left_holds_nobody_up():
    board = board_of([state(0), state(1, 99.0)])
    assert decide(board) == Hang([1])
    assert decide(replace(board, lines=board.lines | {1: replace(board.lines[1], has_left=True)})) is None


class EndsNoProcess(Watch):
    """Notes its exit code, and lets the main thread go on."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.codes = []
        self.lock = threading.Lock()

    def _end_process(self, code):
        self.codes.append(code)
        if self.lock.locked():
            self.lock.release()


def test_a_rank_that_waits_for_others_after_a_failure_ends_though_no_connection_does(tmp_path, monkeypatch):
    monkeypatch.setattr(watch_module, "_SURVIVOR_SECONDS", 0.1)
    store = HashStore()
    publish(store, FAILURE)
    watch = EndsNoProcess(WatchConfig(0, 2, 60.0, tmp_path), store)
    others = SimpleNamespace(wait=watch.lock.acquire)
    others.wait()
    with watch.running():
        others.wait()
    assert watch.codes[0] == 1


@pytest.mark.parametrize("known", [None, Line(1, has_left=True), FAILURE], ids=["nothing", "it left", "its failure"])
def test_a_rank_that_waits_for_one_whose_process_is_gone_names_it_unless_that_had_a_last_word(
    known, tmp_path, monkeypatch
):
    monkeypatch.setattr(watch_module, "_PEER_SECONDS", 0.1)
    monkeypatch.setattr(watch_module, "_SURVIVOR_SECONDS", 2.0)
    monkeypatch.setattr(watch_module, "_OTHERS_SECONDS", 0.1)
    store, lines, ended = HashStore(), list[tuple[str, int]](), subprocess.Popen(["true"])
    ended.wait()
    if isinstance(known, Line):
        store.set("line/1", known.to_json())
    if known is FAILURE:
        publish(store, FAILURE)
    config = WatchConfig(0, 2, 60.0, tmp_path)
    watch = EndsNoProcess(config, store, lambda line, _, code: lines.append((line, code)), {1: ended.pid})
    others = SimpleNamespace(wait=partial(watch.lock.acquire, timeout=4.0))
    others.wait()
    with watch.running():
        others.wait()
    named = (f"rank 1: process {ended.pid} ended without a message, like a killed one", 1)
    assert lines[:1] == ([] if known else [named])
    assert watch.codes[:1] == ([] if isinstance(known, Line) else [1])
    assert store.check(["first failure"]) != isinstance(known, Line)


def test_a_rank_that_has_waited_for_long_when_another_fails_has_time_to_learn_it(tmp_path, monkeypatch):
    monkeypatch.setattr(watch_module, "_SURVIVOR_SECONDS", 1.5)
    store = HashStore()
    watch = EndsNoProcess(WatchConfig(0, 2, 60.0, tmp_path), store)
    watch._progress, watch._progressed_at = activity.progress, time.monotonic() - 30.0
    others = SimpleNamespace(wait=watch.lock.acquire)
    others.wait()
    with watch.running():
        publish(store, FAILURE)
        published = time.monotonic()
        others.wait()
    assert watch.codes[0] == 1 and time.monotonic() - published >= 1.5
