"""Trouble is counted over resumes, and named at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from spmdrl.observability.health import at_ends, counts_so_far, decline_of, likely_cause, trouble_of

GOOD = {"update/count": 1.0, "update/skipped": 0.0, "update/without_rows": 0.0, "frac_advantage_zero": 0.2, "lr": 0.1}
SKIPPED = GOOD | {"update/skipped": 1.0, "loss": 0.5, "grad_norm": math.nan}


def counted(*steps: Mapping[str, float], before: Mapping[str, float] | None = None) -> Mapping[str, float]:
    """The metrics of the last step, with the counts over all."""
    metrics: Mapping[str, float] = before or {}
    for own in steps:
        metrics = {**own, **counts_so_far(own, metrics)}
    return metrics


def test_a_resumed_run_goes_on_counting():
    # An evaluation between steps updates nothing.
    metrics = counted({"eval/accuracy": 0.5}, SKIPPED, before=counted(SKIPPED, GOOD))
    assert trouble_of(metrics) == ["2 of 3 updates were skipped: loss or gradient norm not finite"]


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
    assert decline_of([]) == decline_of([{"loss": 1.0}]) == decline_of(_history(reward=(0.5, 0.5 - 1e-9))) == []
    trouble = trouble_of({"health/steps": 9.0, "health/steps_without_signal": 8.0}, _history(reward=(0.8, 0.0)))
    assert len(trouble) == 2 and "".join(trouble).count("it looks as if") == 1


@pytest.mark.parametrize(
    ("ends", "cause"),
    [
        ({"reward": (0.4, 0.0), "idle": (0.2, 1.0), "norm": (0.4, 12.0)}, "learning rate is too high"),
        ({"reward": (0.3, 0.3), "cut": (0.02, 0.9)}, "learning rate is too high"),
        ({"reward": (0.1, 0.0), "cut": (0.6, 1.0)}, "learning rate is too high"),
        ({"reward": (0.2, 0.6), "idle": (1.0, 1.0), "entropy": (1.8, 0.01)}, "the entropy collapsed"),
        ({"reward": (0.0, 0.0), "cut": (0.99, 0.99), "idle": (1.0, 1.0)}, "answers are cut (99% reach"),
        ({"reward": (0.0, 0.0), "idle": (1.0, 1.0)}, "answers to a prompt are all wrong"),
        ({"reward": (0.9, 1.0), "idle": (1.0, 1.0), "entropy": (0.6, 0.01)}, "answers to a prompt are all right"),
        ({"reward": (0.3, 0.5)}, ""),
    ],
)
def test_the_likely_cause_is_one_of_four_and_prompts_are_not_blamed_for_the_others(ends, cause):
    text = likely_cause(_history(**ends))
    assert text.count("it looks as if") == bool(cause) and cause in text


def test_ends_are_tenths_of_a_long_run_and_halves_of_a_short_one():
    def steps(num_steps: int) -> list[dict[str, float]]:
        return [{"reward": float(step)} for step in range(num_steps)]

    first, last, size = at_ends([{"loss": 1.0}, *steps(100)], "reward")
    assert (first.value, last.value, size) == (4.5, 94.5, 10) and first.low < 4.5 < first.high
    assert [at_ends(steps(count), "reward")[2] for count in (1, 3, 8, 12, 49)] == [1, 1, 4, 5, 5]
    assert math.isnan(at_ends([], "reward")[0].value)
