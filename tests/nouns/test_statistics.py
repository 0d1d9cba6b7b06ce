"""Intervals and pass@k against published values and against counting."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdrl.nouns.statistics import average_at_k, mean_pass_at_k, pass_at_k, wilson


@pytest.mark.parametrize(
    ("correct", "trials", "low", "high"),
    # Newcombe (1998), Statistics in Medicine 17, Table I, method 3; and 0 of 10 in closed form.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718),
     (0, 10, 0.0, 0.2775)],
)  # fmt: skip
def test_wilson_agrees_with_published_values(correct, trials, low, high):
    estimate = wilson(correct, trials)
    assert (round(estimate.low, 4), round(estimate.high, 4)) == (low, high)
    assert estimate.value == correct / trials


@given(st.integers(1, 2000), st.data())
def test_wilson_holds_the_value_stays_in_0_1_and_is_symmetric(trials, data):
    correct = data.draw(st.integers(0, trials))
    estimate, mirrored = wilson(correct, trials), wilson(trials - correct, trials)
    assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
    assert estimate.low == pytest.approx(1 - mirrored.high, abs=1e-12)


@given(st.integers(1, 8), st.data())
def test_pass_at_k_equals_counting_all_choices_of_k(samples, data):
    correct, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    right = [True] * correct + [False] * (samples - correct)
    chosen = list(combinations(right, k))
    assert pass_at_k(samples, correct, k) == pytest.approx(sum(map(any, chosen)) / len(chosen), abs=1e-12)


def test_averages_have_a_normal_interval_over_prompts():
    estimate = average_at_k([[1, 1], [0, 0], [1, 0], [1, 0]])
    # Standard deviation of (1, 0, 0.5, 0.5) is 0.40825; 1.95996 x 0.40825 / 2 = 0.40008.
    assert estimate.value == 0.5
    assert (estimate.low, estimate.high) == (pytest.approx(0.09992, abs=1e-5), pytest.approx(0.90008, abs=1e-5))
    assert mean_pass_at_k([2, 0, 1, 1], 2, 1) == estimate
    assert average_at_k([[1, 0]]).low == 0.0 and average_at_k([[1, 0]]).high == 1.0


def test_what_is_not_defined_is_refused():
    with pytest.raises(ValueError, match="draw more samples or lower k"):
        pass_at_k(4, 1, 8)
    with pytest.raises(ValueError, match="3 correct of 2"):
        wilson(3, 2)
    with pytest.raises(ValueError, match="0 prompts"):
        average_at_k([])
