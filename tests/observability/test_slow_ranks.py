"""Ranks that are slow for some steps in a row are named once, with their stage."""

from __future__ import annotations

import os
import time

import pytest

from spmdrl.observability.slow_ranks import STEPS, SlowRanks, ratios
from spmdrl.runtime.supervision.activity import activity
from tests.support.jobs import finished, metrics_of, run_job, tiny_config

EVEN = {"generation": 1.0, "update": 1.0}
SLOW = {"generation": 1.0, "update": 2.0}


def test_the_median_is_that_of_own_work_without_what_the_main_rank_does_more():
    main = EVEN | {"checkpoint": 9.0}
    assert ratios([main, EVEN, SLOW]) == [1.0, 1.0, 1.5]
    assert ratios([EVEN, SLOW]) == [1.0, 1.5]
    assert ratios([{}, {}]) == [1.0, 1.0]


def test_a_slow_rank_is_named_once_until_it_has_recovered():
    watch = SlowRanks()
    said = [watch.warnings([EVEN, EVEN, SLOW]) for _ in range(1, STEPS + 4)]
    assert [len(lines) for lines in said] == [0] * (STEPS - 1) + [1] + [0] * 3
    assert "rank 2 is slow" in said[STEPS - 1][0] and "1.50 x now, most of it in update (2.00 x)" in said[STEPS - 1][0]
    assert watch.warnings([EVEN, EVEN, EVEN]) == []
    again = [watch.warnings([EVEN, EVEN, SLOW]) for _ in range(STEPS)]
    assert [len(lines) for lines in again] == [0] * (STEPS - 1) + [1]


@pytest.mark.parametrize(("lost", "is_named"), [(0.1, False), (0.2, True)])
def test_what_may_be_chance_in_short_steps_makes_no_rank_slow(lost, is_named):
    watch, short = SlowRanks(), {"generation": 0.1, "update": 0.1}
    slower = short | {"update": 0.1 + lost}
    assert ratios([short, slower])[1] > 1.3
    assert any(watch.warnings([short, slower]) for _ in range(STEPS)) == is_named


class Slowed(type(activity)):
    """Takes long for the update's first part, in its main thread."""

    def _pass(self, name: str, step: int) -> None:
        super()._pass(name, step)
        if name == "update":
            time.sleep(0.4)


def slow_down_rank_1() -> None:
    if os.environ["RANK"] == "1":
        activity.__class__ = Slowed


@pytest.mark.ranks
def test_a_rank_is_slow_though_the_others_wait_for_it_within_the_same_stage(tmp_path):
    options = (f"run.dir={tmp_path / 'run'}", f"train.max_steps={STEPS + 4}")
    job = finished(run_job("train", tiny_config(tmp_path), *options, ranks=2, prepare=slow_down_rank_1))
    assert job.stdout.count("is slow:") == 1
    assert "rank 1 is slow" in job.stdout and "most of it in update" in job.stdout
    assert metrics_of(tmp_path / "run")[-1]["perf/slowest_rank_ratio"] > 1.3


def test_ranks_are_compared_within_their_set():
    training, generating = {"update": 9.0}, {"generation": 1.0}
    seconds = [training, training, {"update": 18.0}, generating, generating]
    sets = [range(3), range(3, 5)]
    assert ratios(seconds, sets) == [1, 1, 2, 1, 1]
    watch = SlowRanks()
    found = [watch.warnings(seconds, sets) for _ in range(STEPS)]
    assert found[:-1] == [[]] * (STEPS - 1)
    (warning,) = found[-1]
    assert "rank 2 is slow" in warning and "most of it in update (2.00 x)" in warning
