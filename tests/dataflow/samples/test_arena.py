from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdrl.dataflow.samples.store.arena import Arena

START, STOP = 128, 128 + 4096


def free_runs(taken: dict[int, int]) -> list[tuple[int, int]]:
    """(start, bytes) of what lies between the taken runs."""
    runs, end = [], START
    for start, size in [*sorted(taken.items()), (STOP, 0)]:
        if start > end:
            runs.append((end, start - end))
        end = start + size
    return runs


@given(st.lists(st.one_of(st.integers(1, 1500), st.integers(-50, -1)), max_size=60))
def test_takes_and_returns_agree_with_a_list_of_taken_runs(steps):
    """A positive step takes that many bytes, a negative one gives a taken run back."""
    arena, taken, peak = Arena(START, STOP), {}, START
    for step in steps:
        if step < 0:
            if taken:
                start = sorted(taken)[step % len(taken)]
                arena.give_back(start)
                del taken[start]
            continue
        size = -(-step // 64) * 64
        fitting = [(room, start) for start, room in free_runs(taken) if room >= size]
        if not fitting:
            with pytest.raises(MemoryError, match=f"{step} bytes of samples find no room"):
                arena.take(step)
            continue
        start = arena.take(step)
        assert start == min(fitting)[1], "the smallest run that is large enough, the lowest of equals"
        taken[start] = size
        peak = max(peak, start + size)
        assert arena.used_bytes == sum(taken.values())
    assert arena.restart_peak() == peak
    for start in taken:
        arena.give_back(start)
    assert arena.used_bytes == 0
    assert arena.take(STOP - START) == START, "freed neighbours must be one run again"


def test_a_run_is_given_back_once():
    arena = Arena(START, STOP)
    start = arena.take(100)
    arena.give_back(start)
    with pytest.raises(ValueError, match="freed before"):
        arena.give_back(start)


def test_a_full_arena_says_what_is_taken_and_what_is_left():
    arena = Arena(START, STOP)
    first = arena.take(1024)
    arena.take(1024)
    arena.give_back(first)
    with pytest.raises(MemoryError, match="1024 of 4096 bytes are taken, and the largest free run has 2048"):
        arena.take(3000)


def test_a_peak_counts_from_what_is_still_taken():
    arena = Arena(START, STOP)
    low, high = arena.take(64), arena.take(64)
    assert arena.restart_peak() == high + 64
    arena.give_back(high)
    assert arena.restart_peak() == high + 64
    assert arena.restart_peak() == low + 64
