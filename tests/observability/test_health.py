"""Trouble is warned of at once but not for ever, counted over resumes, and named at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from spmdrl.observability import health
from spmdrl.observability.health import HealthWatch, at_ends, counts_so_far, decline_of, likely_cause, trouble_of

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


STEADY = {
    "reward": 0.5, "entropy": 0.6, "completions/clipped_ratio": 0.02, "grad_norm": 0.4, "lr": 1e-6,
    "frac_advantage_zero": 0.2,
}  # fmt: skip


def _history(num_steps: int = 40, **ends: tuple[float, float]) -> list[dict[str, float]]:
    """Metrics that go evenly from the first value to the second; others stay."""
    names = {"cut": "completions/clipped_ratio", "idle": "frac_advantage_zero", "norm": "grad_norm"}
    steps = [step / (num_steps - 1) for step in range(num_steps)]
    return [
        STEADY | {names.get(name, name): first + (last - first) * at for name, (first, last) in ends.items()}
        for at in steps
    ]


def _evaluated(before: float, after: float, history: list[dict[str, float]]) -> list[dict[str, float]]:
    ends = [
        {"eval/accuracy": v, "eval/accuracy_low": v - 0.03, "eval/accuracy_high": v + 0.03} for v in (before, after)
    ]
    return [ends[0], *history[:-1], history[-1] | ends[1]]


def test_a_run_that_gets_worse_names_what_fell_and_what_changed_before():
    [text] = decline_of(_evaluated(0.85, 0.72, _history(reward=(0.8, 0.3), entropy=(0.6, 0.01), lr=(1e-4, 1e-4))))
    assert text.startswith("held-out accuracy fell 0.850 -> 0.720 (intervals don't overlap); sampled reward 0.7")
    assert (
        "entropy 0.570 -> 0.040" in text and "learning rate is too high (1.0e-4 now)" in text and "prompt" not in text
    )
    [text] = decline_of(_history(reward=(0.8, 0.3)))
    assert text.startswith("sampled reward fell 0.77") and "don't overlap" in text
    assert decline_of(_evaluated(0.74, 0.72, _history())) == decline_of(_history(reward=(0.3, 0.8))) == []
    assert decline_of([]) == decline_of([{"loss": 1.0}]) == []


@pytest.mark.parametrize(
    ("ends", "cause"),
    [
        ({"reward": (0.4, 0.0), "idle": (0.2, 1.0), "norm": (0.4, 12.0)}, "learning rate is too high"),
        ({"reward": (0.3, 0.3), "cut": (0.02, 0.9)}, "learning rate is too high"),
        ({"reward": (0.0, 0.0), "cut": (0.99, 0.99), "idle": (1.0, 1.0)}, "answers are cut (99% reach"),
        ({"reward": (0.0, 0.0), "idle": (1.0, 1.0)}, "answers to a prompt are all wrong"),
        ({"reward": (0.9, 1.0), "idle": (1.0, 1.0), "entropy": (0.6, 0.01)}, "answers to a prompt are all right"),
        ({"reward": (0.3, 0.5)}, ""),
    ],
)
def test_the_likely_cause_is_one_of_three_and_prompts_are_not_blamed_for_the_others(ends, cause):
    text = likely_cause(_history(**ends))
    assert text.count("it looks as if") == bool(cause) and cause in text


def test_a_run_whose_rate_broke_it_in_its_first_steps_does_not_blame_its_prompts():
    broken = IDLE | {"lr": 1e-3, "grad_norm": 30.0}
    metrics, warnings = _run(GOOD | {"reward": 0.4, "grad_norm": 0.4}, *[broken] * 5, watch=HealthWatch())
    assert "learning rate is too high (1.0e-3 now)" in warnings[3][0] and "all wrong" not in warnings[3][0]
    assert trouble_of(metrics, [STEADY, *[broken] * 8])[0].startswith(
        "5 of 6 steps taught nothing: all advantages were"
    )


def test_ends_are_tenths_of_a_long_run_and_halves_of_a_short_one():
    def steps(num_steps: int) -> list[dict[str, float]]:
        return [{"reward": float(step)} for step in range(num_steps)]

    first, last, size = at_ends([{"loss": 1.0}, *steps(100)], "reward")
    assert (first.value, last.value, size) == (4.5, 94.5, 10) and first.low < 4.5 < first.high
    assert [at_ends(steps(count), "reward")[2] for count in (1, 3, 8, 12, 49)] == [1, 1, 4, 5, 5]
    assert math.isnan(at_ends([], "reward")[0].value)


def test_a_watch_remembers_the_ends_of_a_long_run_only(monkeypatch):
    kept = []
    monkeypatch.setattr(health, "likely_cause", lambda history: kept.append(list(history)) or "")
    _run(*[IDLE | {"reward": float(step)} for step in range(2000)], watch=HealthWatch())
    assert max(map(len, kept)) <= 200
    assert (kept[-1][0]["reward"], kept[-1][-1]["reward"]) == (0.0, 1999.0)
