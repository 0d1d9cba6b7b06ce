"""Trouble that doesn't stop a run: counts over its steps, and a line in its outcome."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from spmdrl.nouns.statistics import Estimate, mean_over_prompts
from spmdrl.observability.terminal.units import fixed, percent, scientific

Metrics = Mapping[str, float]

_COUNTED = {
    "health/updates": "update/count",
    "health/updates_skipped": "update/skipped",
    "health/updates_without_rows": "update/without_rows",
}
# Metrics that change before a run gets worse, with their names in messages.
SIGNS = {
    "reward": "sampled reward", "entropy": "entropy", "completions/clipped_ratio": "share of cut answers",
    "grad_norm": "gradient norm", "lr": "learning rate", "frac_advantage_zero": "share without advantage",
}  # fmt: skip
_SKIPPED_IN_A_ROW = "health/updates_skipped_in_a_row"
_STEPS = "health/steps"
_IDLE = "health/steps_without_signal"
IDLE_IN_A_ROW = "health/steps_without_signal_in_a_row"


def counts_so_far(metrics: Metrics, before: Metrics) -> dict[str, float]:
    """Count over the run up to a step, given the metrics of the step `before` it."""
    known = {name: value for name, value in before.items() if name.startswith("health/")}
    if "update/count" not in metrics:
        return known
    counts = {total: known.get(total, 0.0) + metrics.get(name, 0.0) for total, name in _COUNTED.items()}
    counts[_SKIPPED_IN_A_ROW] = _skipped_in_a_row(metrics, known.get(_SKIPPED_IN_A_ROW, 0.0))
    # Supervised steps have no advantages; steps without rows are counted above.
    if "frac_advantage_zero" not in metrics:
        return known | counts
    idle = metrics["frac_advantage_zero"] == 1.0
    counts[_STEPS] = known.get(_STEPS, 0.0) + 1.0
    counts[_IDLE] = known.get(_IDLE, 0.0) + idle
    counts[IDLE_IN_A_ROW] = known.get(IDLE_IN_A_ROW, 0.0) + 1.0 if idle else 0.0
    return counts


def _skipped_in_a_row(metrics: Metrics, before: float) -> float:
    """Update with rows that were skipped since one was made, those of a step at once."""
    with_rows = metrics["update/count"] - metrics.get("update/without_rows", 0.0)
    skipped = metrics.get("update/skipped", 0.0) - metrics.get("update/without_rows", 0.0)
    return before + skipped if skipped == with_rows else 0.0


def too_many_skips(metrics: Metrics, most: int | None) -> str | None:
    """Explain why a run must end after a step, as its last updates were skipped; None if it goes on."""
    skipped = metrics.get(_SKIPPED_IN_A_ROW, 0.0)
    if most is None or skipped < most:
        return None
    return (
        f"{skipped:.0f} updates in a row were skipped, loss {shown(metrics, 'loss')} and gradient norm "
        f"{shown(metrics, 'grad_norm')} in the last one; the weights are as before the first of them: lower optim.lr "
        f"({shown(metrics, 'lr')} now) or warm it up, look at the rows in the run's folder skipped/, or raise "
        f"train.max_skipped_in_a_row ({most})"
    )


def at_ends(history: Sequence[Metrics], name: str) -> tuple[Estimate, Estimate, int]:
    """Return means of a metric's first and last tenth, by the steps that have it, and the number of steps in a tenth.

    At least five steps, or half of all.
    """
    values = [step[name] for step in history if math.isfinite(step.get(name, math.nan))]
    size = max(len(values) // 10, min(5, len(values) // 2), 1)
    return mean_over_prompts(values[:size]), mean_over_prompts(values[-size:]), size


def likely_cause(history: Sequence[Metrics]) -> str:
    """Describe metrics that changed in a run that got worse or stopped learning, and the likeliest cause."""
    ends = {name: [one.value for one in at_ends(history, name)[:2]] for name in SIGNS}
    changed = [f"{SIGNS[name]} {fixed(a, 3)} -> {fixed(b, 3)}" for name, (a, b) in ends.items() if a < b or a > b]
    (reward, now), (entropy, entropy_now), (cut, cut_now), (norm, norm_now), (_, lr), (_, idle) = ends.values()
    has_broken = now < reward - 0.2 * abs(reward) or entropy_now < entropy / 4 or entropy_now > 3 * entropy
    text = ""
    if cut >= 0.5 <= cut_now <= cut + 0.2:
        text = f"answers are cut ({percent(cut_now)} reach rollout.max_completion_length): raise it"
    elif not now > reward and (has_broken or norm_now > 5 * norm or cut_now > cut + 0.2):
        text = f"the learning rate is too high ({scientific(lr)} now): lower optim.lr, or warm it up"
    elif idle >= 0.9:
        kind = "all right" if now >= 0.99 else "all wrong" if now <= 0.01 else "rewarded alike"
        text = f"the answers to a prompt are {kind}: choose other prompts, or raise rollout.temperature"
        if entropy_now < entropy / 4 and now < 0.99:
            text = "the entropy collapsed: lower optim.lr, or raise algo.clip_ratio_high"
    return "".join(f"; {part}" for part in (", ".join(changed), text and f"it looks as if {text}") if part)


def decline_of(history: Sequence[Metrics]) -> list[str]:
    """Describe metrics that fell over a run by more than chance, with the likely cause."""
    found = [step for step in history if "eval/accuracy" in step]
    is_accuracy = all(step["eval/accuracy"] == step.get("eval/reward", step["eval/accuracy"]) for step in found)
    name = "eval/accuracy" if is_accuracy else "eval/reward"
    before, after, _ = at_ends(history, "reward")
    if found and found[-1].get(f"{name}_high", math.inf) < found[0].get(f"{name}_low", -math.inf):
        what, first, last = f"held-out {name[5:]}", found[0][name], found[-1][name]
    # Beyond the rounding of rewards that are the same.
    elif after.high < before.low - 1e-6 * abs(before.low):
        what, first, last = "sampled reward", before.value, after.value
    else:
        return []
    return [f"{what} fell {fixed(first, 3)} -> {fixed(last, 3)} (intervals don't overlap){likely_cause(history)}"]


def trouble_of(metrics: Metrics, history: Sequence[Metrics] = ()) -> list[str]:
    """Describe trouble for a run's outcome, from the metrics of its last step and of all steps."""
    updates, skipped = metrics.get("health/updates", 0.0), metrics.get("health/updates_skipped", 0.0)
    steps, idle = metrics.get(_STEPS, 0.0), metrics.get(_IDLE, 0.0)
    without_rows = metrics.get("health/updates_without_rows", 0.0)
    trouble, declined = list[str](), decline_of(history)
    if skipped > without_rows:
        trouble.append(
            f"{skipped - without_rows:.0f} of {updates:.0f} updates were skipped: loss or gradient norm not finite"
        )
    if without_rows:
        trouble.append(f"{without_rows:.0f} of {updates:.0f} updates were skipped: {why_without_rows(metrics)}")
    # Late in a good run some steps have no signal.
    if 2 * idle > steps:
        cause = "" if declined else likely_cause(history)
        trouble.append(f"{idle:.0f} of {steps:.0f} steps taught nothing: all advantages were 0{cause}")
    return trouble + declined


def num_left_out(metrics: Metrics) -> float:
    """Count rows with a reward that the algorithm left out."""
    return metrics.get("select/dropped_rows", 0.0) - metrics.get("select/no_reward", 0.0)


def why_without_rows(metrics: Metrics) -> str:
    """Return the reason why a step had no rows to train on."""
    return "the algorithm left out every prompt" if num_left_out(metrics) else "no row had a usable reward"


def shown(metrics: Metrics, name: str) -> str:
    """Return a metric for a message."""
    return scientific(metrics[name]) if name in metrics else "unknown"
