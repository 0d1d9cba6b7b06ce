"""95% intervals of measured accuracies, and pass@k: pure functions of counts and scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

_QUANTILE = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Estimate:
    """A measured value, and the interval that contains the true one with a probability of 95%."""

    value: float
    low: float
    high: float


def interval_of(estimate: Estimate) -> list[float] | None:
    """Return the ends of its interval, or None if they are unknown."""
    ends = [estimate.low, estimate.high]
    return ends if all(map(math.isfinite, ends)) else None


def wilson(num_correct: float, num_trials: int) -> Estimate:
    """Estimate a proportion with Wilson's score interval (Wilson 1927), which holds near 0 and 1 and for few trials."""
    if not 0 <= num_correct <= num_trials or num_trials == 0:
        raise ValueError(
            f"{num_correct} correct of {num_trials} is no proportion; give 0 <= correct <= trials, trials > 0"
        )
    z2 = _QUANTILE**2
    value = num_correct / num_trials
    spread = math.sqrt(z2 * (value * (1 - value) + z2 / (4 * num_trials)) / num_trials)
    center, scale = value + z2 / (2 * num_trials), 1 + z2 / num_trials
    # Rounding may leave the ends slightly beyond 0, 1 or the value itself.
    low, high = max(0.0, (center - spread) / scale), min(1.0, (center + spread) / scale)
    return Estimate(value, min(low, value), max(high, value))


def average_at_k(scores_GN: Sequence[Sequence[float]]) -> Estimate:
    """Estimate avg@k: the mean over prompts of the mean score of a prompt's k responses, scores in [0, 1].

    The interval is normal over prompts, since the responses of one prompt aren't independent.
    """
    return _mean_over_prompts([fmean(scores_N) for scores_N in scores_GN])


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Estimate, without bias, the chance that at least one of k responses is right (Chen et al. 2021, arXiv:2107.03374,
    Eq. 1).

    1 - C(n - c, k) / C(n, k) for n samples of which c are right, as a product that can't overflow.
    """
    if not (0 <= num_correct <= num_samples and 1 <= k <= num_samples):
        raise ValueError(
            f"pass@{k} of {num_correct} correct in {num_samples} samples isn't defined; "
            "it needs 0 <= correct <= samples and 1 <= k <= samples: draw more samples or lower k"
        )
    if num_samples - num_correct < k:
        return 1.0
    misses = (1 - k / n for n in range(num_samples - num_correct + 1, num_samples + 1))
    return 1.0 - math.prod(misses)


def mean_pass_at_k(num_correct_G: Sequence[int], num_samples: int, k: int) -> Estimate:
    """Estimate pass@k over prompts, each with the same number of samples, with a normal interval over prompts."""
    return _mean_over_prompts([pass_at_k(num_samples, correct, k) for correct in num_correct_G])


def mean_over_prompts(values_G: Sequence[float]) -> Estimate:
    """Estimate the mean of any values, one per prompt, with a normal interval over prompts.

    The interval's ends are NaN with fewer than two prompts, or values too large to be squared; without a prompt
    everything is NaN.
    """
    if not values_G:
        return Estimate(math.nan, math.nan, math.nan)
    count, value = len(values_G), _mean(values_G)
    if count == 1:
        return Estimate(value, math.nan, math.nan)
    variance = _mean([(each - value) * (each - value) for each in values_G]) * count / (count - 1)
    margin = _QUANTILE * math.sqrt(variance / count) if math.isfinite(variance) else math.nan
    return Estimate(value, value - margin, value + margin)


def _mean(values: Sequence[float]) -> float:
    """Return the mean, even if the sum overflows or values aren't finite."""
    try:
        return math.fsum(values) / len(values)
    except (OverflowError, ValueError):
        return sum(value / len(values) for value in values)


def _mean_over_prompts(values_G: Sequence[float]) -> Estimate:
    if not values_G:
        raise ValueError("an average over 0 prompts isn't defined; give at least one prompt")
    value = fmean(values_G)
    if len(values_G) == 1:
        # One prompt gives no estimate of the spread.
        return Estimate(value, 0.0, 1.0)
    margin = _QUANTILE * stdev(values_G) / math.sqrt(len(values_G))
    return Estimate(value, max(0.0, value - margin), min(1.0, value + margin))
