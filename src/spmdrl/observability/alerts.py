"""Alerts: symptoms of a run that goes wrong, as rules over its steps, and their repetition."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from spmdrl.nouns.settings.alert_rule import FIRST_STEPS, NEVER, read_rules
from spmdrl.observability.health import IDLE_IN_A_ROW, SIGNS, likely_cause, num_left_out, shown, why_without_rows
from spmdrl.observability.terminal.spelling import nearest
from spmdrl.observability.terminal.units import fixed, percent, scientific

Metrics = Mapping[str, float]
History = Sequence[Metrics]

STEPS_WITHOUT_SIGNAL = 3
"""number of consecutive steps without a signal that is no coincidence"""
_STEPS_BEFORE_ADVICE = 10
_KEPT_STEPS = 100  # At each end of a run; its middle isn't needed for trends.
_PAGE = "docs/bad_run.md#"
_LEARNT = ("reward", "preference/accuracy", "answer_probability")
"""measures of what is learnt, of which a kind of step has one"""
_KEPT = {
    *SIGNS, *_LEARNT, "reward_std", "frac_reward_zero_std", "mismatch/abs_mean", "completions/mean_length", "loss",
    *(f"eval/{name}{end}" for name in ("accuracy", "reward") for end in ("", "_low", "_high")),
}  # fmt: skip


@dataclass(frozen=True)
class Alert:
    """One line for a person: a symptom of a step, the rule that found it, and the page that explains it."""

    step: int
    symptom: str
    """name of the rule; for one of log.alerts, its metric"""
    text: str
    rule: str
    page: str

    @property
    def line(self) -> str:
        return f"WARNING: step {self.step}: {self.text} [{self.rule}; {self.page}]"


@dataclass(frozen=True)
class Symptom:
    """A default rule: its conditions in words, and a function that describes a step for which they hold."""

    rule: str
    found: Callable[[Metrics, History], str]
    """text about the newest step of the history, whose metrics come first; empty if nothing is wrong"""
    page: str


class AlertWatch:
    """Rules over the steps of a run: each symptom gives an alert at its 1st, 10th, 100th, ... occurrence."""

    def __init__(self, alerts: Mapping[str, str] | None = None, earlier: Sequence[Metrics] = ()) -> None:
        """`alerts` are those of the config, `earlier` the metrics of the steps before a resumed run."""
        self._own = read_rules(alerts or {})
        self._off = {name for name, text in (alerts or {}).items() if text == NEVER}
        conditions = [condition for rule in self._own.values() for condition in rule.conditions]
        self._kept = _KEPT | {condition.metric for condition in conditions}
        self._times: Counter[str] = Counter()
        self._history: list[Metrics] = []
        for metrics in earlier:
            self._keep(metrics)

    def alerts(self, step: int, metrics: Metrics, slow: Sequence[str] = ()) -> list[Alert]:
        """Return the alerts after a step, with the likely cause and a way out; `slow` describes slow ranks."""
        self._keep(metrics)
        due = [
            Alert(step, name, text, symptom.rule, symptom.page)
            for name, symptom in SYMPTOMS_FOUND.items()
            if (text := symptom.found(metrics, self._history)) and self._is_due(name)
        ]
        due += [
            Alert(step, name, f"{name} is {fixed(metrics[name], 4)}", rule.text, "docs/metrics.md#alerts")
            for name, rule in self._own.items()
            if rule.holds(self._history) and self._is_due(name)
        ]
        if len(self._history) == _STEPS_BEFORE_ADVICE:
            due += self._misspelt(step, metrics)
        if broken := [f"{name} is {value}" for name, value in _broken(metrics) if self._is_due(name)]:
            text = f"not finite: {', '.join(broken)}"
            due.append(Alert(step, "not-finite", text, "a metric is nan or inf", "docs/failures.md#non-finite-values"))
        due += [Alert(step, "slow-ranks", text, "own work", "docs/failures.md#slow-ranks") for text in slow]
        return [alert for alert in due if alert.symptom not in self._off]

    def _misspelt(self, step: int, metrics: Metrics) -> Iterator[Alert]:
        """Yield rules of a metric that no step has recorded, but whose name is nearly that of another one."""
        seen = {name for earlier in self._history for name in earlier}
        for rule in self._own.values():
            for name in {condition.metric for condition in rule.conditions} - seen:
                if near := nearest(name, metrics):
                    text = f"log.alerts has a rule of {name}, which no step has recorded; did you mean {near}?"
                    yield Alert(step, name, text, rule.text, "docs/metrics.md")

    def _keep(self, metrics: Metrics) -> None:
        self._history.append({name: value for name, value in metrics.items() if name in self._kept})
        del self._history[_KEPT_STEPS:-_KEPT_STEPS]

    def _is_due(self, kind: str) -> bool:
        self._times[kind] += 1
        return math.log10(self._times[kind]).is_integer()


def _skipped(metrics: Metrics, history: History) -> str:
    if not metrics.get("update/skipped", 0.0) > metrics.get("update/without_rows", 0.0):
        return ""
    return (
        f"an update was SKIPPED ({_skips(metrics)}), the weights are as before: loss {shown(metrics, 'loss')}, "
        f"gradient norm {shown(metrics, 'grad_norm')}; usually the learning rate is too high ({shown(metrics, 'lr')} "
        "now) or a reward is huge: lower the rate, warm it up, or look at the rewards in samples.jsonl"
    )


def _without_signal(metrics: Metrics, history: History) -> str:
    if metrics.get("update/without_rows"):
        advice = (
            "select/* counts the reasons: look at the rewards in samples.jsonl, or choose other prompts"
            if num_left_out(metrics)
            else "the reward functions gave None or failed for every row: try them by hand on rows of samples.jsonl"
        )
        return f"an update was SKIPPED ({_skips(metrics)}): {why_without_rows(metrics)}, so nothing is learnt; {advice}"
    if metrics.get(IDLE_IN_A_ROW, 0.0) < STEPS_WITHOUT_SIGNAL:
        return ""
    return (
        f"all advantages were 0 in {metrics[IDLE_IN_A_ROW]:.0f} steps in a row, so nothing is learnt: the responses to "
        f"a prompt all have the same reward (mean {shown(metrics, 'reward')}); look at samples.jsonl"
        f"{likely_cause(history)}"
    )


def _unfilled(metrics: Metrics, history: History) -> str:
    if not metrics.get("refill/unfilled"):
        return ""
    return (
        f"{metrics['refill/unfilled']:.0f} prompts are missing of those that a step trains, and it goes on with fewer: "
        f"after {metrics['refill/attempts']:.0f} attempts the responses to the others are all right or all wrong; "
        "raise algo.max_refills or rollout.num_generations, or choose other prompts"
    )


def _collapse(metrics: Metrics, history: History) -> str:
    """Return a fall of the reward far beyond chance, or a loss of supervised steps that grows."""
    if "reward" not in metrics:
        losses = _values(history, "loss")
        # The first update may have broken it already.
        first, last = min(losses[:FIRST_STEPS], default=0.0), losses[-3:]
        if len(losses) <= FIRST_STEPS or first <= 0 or min(last) <= 1.2 * first:
            return ""
        return f"the loss grew {fixed(first, 3)} -> {fixed(last[-1], 3)}{_rate(metrics)}"
    rewards, spread = _values(history, "reward"), _values(history, "reward_std")
    means = [fmean(rewards[at : at + 3]) for at in range(len(rewards) - 2)]
    if len(means) < 2 or not spread:
        return ""
    most, now = max(means), means[-1]
    if most - now <= max(0.5 * abs(most), 0.5 * fmean(spread[:FIRST_STEPS])):
        return ""
    return f"the reward fell {fixed(most, 3)} -> {fixed(now, 3)}{_rate(metrics)}"


def _truncated(metrics: Metrics, history: History) -> str:
    cut = _last(metrics, history, "completions/clipped_ratio", 3)
    if not cut or min(cut) <= 0.75:
        return ""
    return f"{percent(cut[-1])} of the answers are cut at rollout.max_completion_length: raise it, or have answers end"


def _collapsed_entropy(metrics: Metrics, history: History) -> str:
    """Return an entropy near 0 while prompts are right or wrong as a whole: their responses are copies."""
    last, tied = _last(metrics, history, "entropy", 3), _last(metrics, history, "frac_reward_zero_std", 3)
    # Of few prompts a single step may have one that isn't tied, or none that is right.
    stds, first = _last(metrics, history, "reward_std", 3), _values(history, "entropy")[:FIRST_STEPS]
    # Below 0.01 it was near 0 from the start, as at a temperature of 0.
    if not (last and tied and stds and 0.01 < fmean(first) > 5 * max(last) and fmean(tied) > 0.8 and max(stds) > 0.1):
        return ""
    return (
        f"the entropy fell {fixed(fmean(first), 3)} -> {fixed(last[-1], 3)}, and in {percent(fmean(tied))} of prompts "
        "all responses have the same reward: raise algo.clip_ratio_high or rollout.temperature, or lower optim.lr"
    )


def _mismatch(metrics: Metrics, history: History) -> str:
    last = _last(metrics, history, "mismatch/abs_mean", 3)
    if not last or min(last) <= 0.05:
        return ""
    return (
        f"the generator's log-probs lie {scientific(last[-1])} from the trainer's: set reshard.verify=true, "
        "rollout.engine=native or model.dtype=float32 to find out why, or algo.rollout_is=tis to live with it"
    )


def _longer(metrics: Metrics, history: History) -> str:
    """Return lengths that doubled without a gain of the reward."""
    last, rewards = _last(metrics, history, "completions/mean_length", 5), _values(history, "reward")
    first = _values(history, "completions/mean_length")[:FIRST_STEPS]
    if not last or min(last) <= 2 * fmean(first) or len(rewards) < 5:
        return ""
    before, now = fmean(rewards[:FIRST_STEPS]), fmean(rewards[-5:])
    if now - before > 0.1 * metrics.get("reward_std", 0.0):
        return ""
    return (
        f"the answers grew from {fixed(fmean(first), 0)} to {fixed(last[-1], 0)} tokens while the reward went "
        f"{fixed(before, 3)} -> {fixed(now, 3)}: read some in samples.jsonl, or use algo.loss_agg=token-mean or "
        "algo.overlong_cache"
    )


def _worse_held_out(metrics: Metrics, history: History) -> str:
    """Return a held-out measure below an earlier one, their intervals apart, while what is trained didn't fall."""
    learnt = next((name for name in _LEARNT if name in metrics), "")
    name = next((f"eval/{one}" for one in ("reward", "accuracy") if f"eval/{one}_high" in metrics), "")
    found = [(at, step[f"{name}_low"]) for at, step in enumerate(history) if f"{name}_low" in step]
    if not learnt or not name or len(found) < 2:
        return ""
    at, low = max(found, key=lambda one: one[1])
    before, now = _values(history[at + 1 : at + 6], learnt), _values(history, learnt)[-5:]
    if not metrics[f"{name}_high"] < low or not before or fmean(now) < fmean(before):
        return ""
    return (
        f"held-out {name[5:]} fell {fixed(history[at][name], 3)} -> {fixed(metrics[name], 3)} (intervals apart)"
        f" while {learnt} went {fixed(fmean(before), 3)} -> {fixed(fmean(now), 3)}: more prompts, a lower optim.lr, "
        "algo.kl_coef, or the best checkpoint (checkpoint.keep_best)"
    )


SYMPTOMS_FOUND: Mapping[str, Symptom] = {
    "updates-skipped": Symptom("loss or gradient not finite", _skipped, "docs/failures.md#non-finite-values"),
    "learning-rate-too-high": Symptom(
        "mean reward of 3 < half of its most and reward_std / 2 below it; without rewards, loss > 1.2 x first for 3",
        _collapse, f"{_PAGE}learning-rate-too-high",
    ),
    "rewards-all-tied": Symptom(
        f"frac_advantage_zero is 1 for {STEPS_WITHOUT_SIGNAL}, or update/without_rows > 0", _without_signal,
        f"{_PAGE}rewards-all-tied",
    ),
    "steps-unfilled": Symptom("refill/unfilled > 0", _unfilled, f"{_PAGE}rewards-all-tied"),
    "answers-truncated": Symptom("completions/clipped_ratio > 0.75 for 3", _truncated, f"{_PAGE}answers-truncated"),
    "entropy-collapse": Symptom(
        "of 3: entropy < 0.2 x first, mean frac_reward_zero_std > 0.8, most reward_std > 0.1", _collapsed_entropy,
        f"{_PAGE}entropy-collapse",
    ),
    "rollout-mismatch": Symptom("mismatch/abs_mean > 0.05 for 3", _mismatch, f"{_PAGE}rollout-mismatch"),
    "lengths-grow": Symptom(
        "completions/mean_length > 2 x first for 5, and reward no higher", _longer, f"{_PAGE}lengths-grow"
    ),
    "eval-falls-while-reward-rises": Symptom(
        "eval/*_high below an earlier eval/*_low, and reward no lower", _worse_held_out,
        f"{_PAGE}eval-falls-while-reward-rises",
    ),
}  # fmt: skip


def _values(history: History, name: str) -> list[float]:
    return [step[name] for step in history if math.isfinite(step.get(name, math.nan))]


def _last(metrics: Metrics, history: History, name: str, count: int) -> list[float]:
    """Return the metric's newest values; none if they are fewer, or the newest step has no finite one."""
    values = _values(history[-4 * count :], name)[-count:]
    return values if len(values) == count and math.isfinite(metrics.get(name, math.nan)) else []


def _broken(metrics: Metrics) -> Iterator[tuple[str, float]]:
    """Yield non-finite metrics, except those in the warning of a skipped update."""
    named = ("loss", "grad_norm") if metrics.get("update/skipped") else ()
    return ((name, value) for name, value in metrics.items() if not math.isfinite(value) and name not in named)


def _skips(metrics: Metrics) -> str:
    return f"{metrics.get('health/updates_skipped', 0.0):.0f} of {metrics.get('health/updates', 0.0):.0f} so far"


def _rate(metrics: Metrics) -> str:
    return f": the learning rate is too high ({shown(metrics, 'lr')} now): lower it, or warm it up"
