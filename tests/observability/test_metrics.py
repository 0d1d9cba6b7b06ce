"""Metrics of several ranks reduce to what one rank with all values would have computed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdrl.observability.metrics import Recorder, encode, merge

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8)
RANKS = st.lists(VALUES, min_size=1, max_size=5)


def _merged(values_by_rank: list[list[float]], record: str) -> dict[str, float]:
    payloads = []
    for values in values_by_rank:
        recorder = Recorder()
        for value in values:
            getattr(recorder, record)("x", value)
        payloads.append(encode(recorder.drain()))
    return merge(payloads)


@given(RANKS)
def test_merging_ranks_equals_computing_over_all_values(values_by_rank):
    everything = [value for values in values_by_rank for value in values]
    assert _merged(values_by_rank, "maximum") == {"x": max(everything)}
    assert _merged(values_by_rank, "minimum") == {"x": min(everything)}
    total = _merged(values_by_rank, "total")["x"]
    assert math.isclose(total, math.fsum(everything), rel_tol=1e-9, abs_tol=1e-6)
    mean = _merged(values_by_rank, "mean")["x"]
    assert math.isclose(mean, math.fsum(everything) / len(everything), rel_tol=1e-9, abs_tol=1e-6)


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(0, 50)), min_size=1, max_size=10), st.randoms())
def test_means_are_weighted_by_their_counts_whatever_the_order_of_ranks(parts, random):
    payloads = []
    for value, count in parts:
        recorder = Recorder()
        recorder.mean("x", value, count)
        payloads.append(encode(recorder.drain()))
    merged = merge(payloads)
    random.shuffle(payloads)
    assert merge(payloads) == merged
    whole = sum(count for _, count in parts)
    if whole == 0:
        assert merged == {}
    else:
        expected = sum(value * count for value, count in parts) / whole
        assert math.isclose(merged["x"], expected, rel_tol=1e-9, abs_tol=1e-9)


def test_names_come_out_sorted_and_a_rank_may_lack_one():
    first, second = Recorder(), Recorder()
    first.total("b", 1)
    first.total("a", 2)
    second.total("c", 3)
    merged = merge([encode(first.drain()), encode(second.drain())])
    assert list(merged.items()) == [("a", 2.0), ("b", 1.0), ("c", 3.0)]


def test_a_nan_on_any_rank_shows():
    for record in ("mean", "total", "maximum", "minimum"):
        assert math.isnan(_merged([[1.0], [math.nan], [2.0]], record)["x"])
    assert math.isnan(_merged([[math.inf], [-math.inf]], "total")["x"])
    assert _merged([[math.inf], [1.0]], "mean")["x"] == math.inf


def test_draining_starts_anew():
    recorder = Recorder()
    recorder.total("x", 1)
    assert set(recorder.drain()) == {"x"}
    assert recorder.drain() == {}


def test_one_name_recorded_in_two_ways_is_refused():
    recorder = Recorder()
    recorder.total("x", 1)
    with pytest.raises(ValueError, match="x is recorded as total and as mean"):
        recorder.mean("x", 1)
    other = Recorder()
    other.maximum("x", 1)
    with pytest.raises(ValueError, match="total and as max"):
        merge([encode(recorder.drain()), encode(other.drain())])


def test_values_near_the_limit_of_floats_are_merged_without_an_error():
    ranks = []
    for _ in range(2):
        recorder = Recorder()
        recorder.mean("mean", 1e308)
        recorder.total("total", 1e308)
        recorder.mean("opposite", math.inf)
        ranks.append(encode(recorder.drain()))
    merged = merge(ranks)
    assert merged["mean"] == 1e308 and merged["total"] == math.inf and merged["opposite"] == math.inf


def test_an_amount_that_ranks_hold_alike_is_counted_once():
    ranks = []
    for _ in range(3):
        recorder = Recorder()
        recorder.alike("updates", 1)
        recorder.alike("updates", 1)
        ranks.append(encode(recorder.drain()))
    assert merge(ranks) == {"updates": 2.0}


@given(st.lists(st.lists(st.integers(-(10**6), 10**6), max_size=8), min_size=1, max_size=5))
def test_counts_recorded_together_are_to_the_bit_what_they_are_one_by_one(parts):
    together, each = Recorder(), Recorder()
    for values in parts:
        together.mean_of("x", values)
        for value in values:
            each.mean("x", value)
    assert together.drain() == each.drain()
