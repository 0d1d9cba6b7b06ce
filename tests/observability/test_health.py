"""Trouble is warned of at once but not for ever, counted over resumes, and named at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping

from spmdrl.observability.health import HealthWatch, counts_so_far, trouble_of

GOOD = {"update/count": 1.0, "update/skipped": 0.0, "update/without_rows": 0.0, "frac_advantage_zero": 0.2, "lr": 0.1}
SKIPPED = GOOD | {"update/skipped": 1.0, "loss": 0.5, "grad_norm": math.nan}
EMPTY = {"update/count": 2.0, "update/skipped": 2.0, "update/without_rows": 2.0}
IDLE = GOOD | {"frac_advantage_zero": 1.0, "reward": 0.0}


def _run(*steps: Mapping[str, float], watch: HealthWatch, before: Mapping[str, float] | None = None):
    metrics: Mapping[str, float] = before or {}
    warnings: list[list[str]] = []
    for step, own in enumerate(steps, 1):
        metrics = {**own, **counts_so_far(own, metrics)}
        warnings.append(watch.warnings(step, metrics))
    return metrics, warnings


def test_a_skipped_update_is_warned_of_at_once_and_counted_to_the_end():
    metrics, warnings = _run(GOOD, SKIPPED, SKIPPED, watch=HealthWatch())
    assert [len(found) for found in warnings] == [0, 1, 0]
    assert warnings[1][0].startswith("WARNING: step 2: an update was SKIPPED (1 of 2 so far)")
    assert "gradient norm nan" in warnings[1][0] and "learning rate" in warnings[1][0]
    assert trouble_of(metrics) == ["2 of 3 updates were skipped: loss or gradient norm not finite"]


def test_a_resumed_run_goes_on_counting():
    first, _ = _run(SKIPPED, GOOD, watch=HealthWatch())
    # An evaluation between steps updates nothing.
    second, _ = _run({"eval/accuracy": 0.5}, SKIPPED, watch=HealthWatch(), before=first)
    assert trouble_of(second) == ["2 of 3 updates were skipped: loss or gradient norm not finite"]


def test_steps_without_a_usable_reward_are_named_as_such():
    metrics, warnings = _run(EMPTY, watch=HealthWatch())
    assert len(warnings[0]) == 1 and "no row had a usable reward" in warnings[0][0]
    assert trouble_of(metrics) == ["2 of 2 updates were skipped: no row had a usable reward"]


def test_rows_that_the_algorithm_left_out_are_not_said_to_lack_a_reward():
    metrics, warnings = _run(EMPTY | {"select/dropped_rows": 8.0, "select/no_reward": 2.0}, watch=HealthWatch())
    assert "the algorithm left out every prompt, so nothing is learnt; select/*" in warnings[0][0]
    assert trouble_of(metrics) == ["2 of 2 updates were skipped: the algorithm left out every prompt"]


def test_steps_that_could_not_be_filled_are_warned_of_rarely():
    unfilled = GOOD | {"refill/unfilled": 3.0, "refill/attempts": 5.0}
    _, warnings = _run(*[unfilled] * 12, watch=HealthWatch())
    assert [step for step, found in enumerate(warnings, 1) if found] == [1, 10]
    assert "3 prompts are missing of those that a step trains" in warnings[0][0] and "5 attempts" in warnings[0][0]


def test_several_steps_in_a_row_without_a_signal_are_warned_of():
    metrics, warnings = _run(IDLE, IDLE, GOOD, IDLE, IDLE, IDLE, watch=HealthWatch())
    assert [len(found) for found in warnings] == [0, 0, 0, 0, 0, 1]
    assert "0 in 3 steps in a row" in warnings[-1][0] and "(mean 0)" in warnings[-1][0]
    assert trouble_of(metrics) == ["5 of 6 steps taught nothing: all advantages were 0"]
    assert trouble_of(_run(GOOD, IDLE, watch=HealthWatch())[0]) == []


def test_other_metrics_that_are_not_finite_are_named_together_and_rarely():
    broken = GOOD | {"kl": math.inf, "entropy": math.nan}
    _, warnings = _run(*[broken] * 30, watch=HealthWatch())
    assert [step for step, found in enumerate(warnings, 1) if found] == [1, 10]
    assert warnings[0] == ["WARNING: step 1: not finite: kl is inf, entropy is nan"]


def test_a_supervised_run_has_no_advantages_to_warn_of():
    supervised = {"update/count": 1.0, "update/skipped": 0.0, "loss": 1.0}
    metrics, warnings = _run(*[supervised] * 5, watch=HealthWatch())
    assert not any(warnings) and trouble_of(metrics) == [] and metrics["health/updates"] == 5
