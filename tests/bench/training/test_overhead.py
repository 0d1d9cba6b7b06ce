"""Pieces that guard a run are timed without what they call among themselves, and can be left out."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from spmdrl.engines.training.checkpoints import checkpoint
from spmdrl.runtime.supervision import fence
from tests.bench.training import safeguards
from tests.bench.training.overhead import piece_rows
from tests.bench.training.safeguards import MAIN_THREAD, THREADS, PieceTimes
from tests.support.ranks import end, fork


def test_a_piece_inside_another_one_counts_once():
    times = PieceTimes()
    inner = times.called("inner", lambda: time.sleep(0.2))
    outer = times.called("outer", lambda: (inner(), inner()))
    outer()
    assert times.calls == {"inner": 2, "outer": 1}
    assert times.seconds["inner"] >= 0.4
    assert times.seconds["outer"] < 0.2


def test_a_thread_counts_with_the_seconds_in_which_it_computes():
    times = PieceTimes()

    def compute(seconds: float) -> None:
        while time.thread_time() < seconds:
            pass
        time.sleep(seconds)

    thread = threading.Thread(target=times.running("watch", compute), args=(0.2,))
    thread.start()
    thread.join()
    # Half of its time at most, and what it computes beyond that before it looks at the clock.
    assert 0 < times.shares["watch"] < 0.6


def test_a_thread_that_ends_at_once_adds_what_it_computes_to_one_that_stays():
    times = PieceTimes()
    for seconds in (0.0, 0.2, 0.0):
        thread = threading.Thread(target=times.running("watch", time.sleep), args=(seconds,))
        thread.start()
        thread.join()
    assert 0 < times.shares["watch"] < 0.1


def test_the_rank_where_a_piece_takes_most_counts():
    def of_rank(seconds: float) -> dict[str, dict[str, float]]:
        return {
            "seconds": {"fencing": seconds},
            "calls": {"fencing": 20},
            "shares": {"hang and stop watch": seconds / 100},
        }

    rows = {row["piece"]: row for row in piece_rows([[of_rank(0.01), of_rank(0.02)]], num_steps=10)}
    assert rows["fencing"]["ms per step"] == pytest.approx(2) and rows["fencing"]["calls per step"] == 2
    assert rows["hang and stop watch"]["share of 0.5 s"] == pytest.approx(2e-4)


def _time_and_leave_out() -> None:
    times = safeguards.time_pieces()
    checkpoint.check_fence()
    assert times.calls["fencing"] == 1
    safeguards.leave_out_pieces()
    # Another job's token would end this process.
    fence.arm_fence(Path("none"), b"other")
    checkpoint.check_fence()


def test_every_piece_is_found_where_it_is_and_where_it_was_imported():
    process = fork(_time_and_leave_out)
    process.join(60)
    code = process.exitcode
    end(process, grace_seconds=0)
    assert code == 0


def test_pieces_have_names_of_their_own():
    assert not set(MAIN_THREAD) & set(THREADS)
