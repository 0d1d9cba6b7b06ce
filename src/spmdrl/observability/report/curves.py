"""Curves of the report in order; several runs share each chart."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from spmdrl.observability.report.charts import Chart, Series, has_values
from spmdrl.observability.report.gantt import stage_order
from spmdrl.observability.report.run_files import RunData
from spmdrl.observability.report.traffic_section import LINKS
from spmdrl.observability.summary import AT_K
from spmdrl.observability.terminal.units import byte_unit

# (title, unit, metric) of the curves of learning and stability.
LEARNING = (
    ("Reward", "mean", "reward"),
    ("Pairs in order", "fraction of pairs", "preference/accuracy"),
    ("Margin of the pairs", "reward, mean", "preference/margin"),
    ("Probability of an answer", "mean", "answer_probability"),
    ("Response length", "tokens, mean", "completions/mean_length"),
    ("Cut at the length limit", "fraction of responses", "completions/clipped_ratio"),
    ("Prompts without advantage", "fraction of prompts", "frac_reward_zero_std"),
    ("Entropy", "nats per token", "entropy"),
    ("KL to the reference", "nats per token", "kl"),
    ("Mismatch of rollout and trainer", "log-prob difference, mean", "mismatch/abs_mean"),
    ("Largest mismatch", "log-prob difference", "mismatch/abs_max"),
    ("Age of the tokens", "policy versions, mean", "off_policy/mean"),
    ("Gradient norm", "", "grad_norm"),
    ("Loss", "", "loss"),
    ("Learning rate", "", "lr"),
    ("Critic: explained variance", "fraction of the returns' variance", "critic/explained_variance"),
    ("Critic: loss", "", "critic/loss"),
    ("Critic: gradient norm", "", "critic/grad_norm"),
    ("Critic: learning rate", "", "critic/lr"),
)
SPEED = (
    ("Seconds per step", "s", "time/step"),
    ("Throughput", "tokens/s", "perf/tokens_per_second"),
)
# Prefixes of names that aren't about learning.
MACHINERY = ("checkpoint/", "dock/", "generation/", "health/", "log/", "mem/", "perf/", "reshard/", "time/", "update/")
LAGS = "off_policy/lag_"
PART = re.compile("rewards/.+/mean")
RESHARDING = {"all": "reshard/bytes", "across nodes": "reshard/cross_node_bytes"}
RESHARDING_RATES = {
    "between ranks": "reshard/gb_per_second",
    "to the host": "reshard/to_host_gb_per_second",
    "from the host": "reshard/from_host_gb_per_second",
}


def learning_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Return charts of reward, evaluation, and early signs of trouble."""
    charts = [_metric_chart(runs, title, unit, metric) for title, unit, metric in LEARNING]
    return _filled(charts[:1] + _part_charts(runs) + _eval_charts(runs) + charts[1:] + [_lag_chart(runs[0])])


def _part_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Return a chart of each part of the reward, if it has several."""
    names = sorted({name for run in runs for name in run.metric_names if PART.fullmatch(name)})
    titles = [f"Reward: {name.removeprefix('rewards/').removesuffix('/mean')}" for name in names]
    return [
        _metric_chart(runs, title, "mean, before its weight", name)
        for title, name in zip(titles, names, strict=True)
        if len(names) > 1
    ]


def speed_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Return charts of seconds per step, of all runs and of the first run's stages, and throughput."""
    charts = [_of_steps(_metric_chart(runs, title, unit, metric)) for title, unit, metric in SPEED]
    timed = [name[5:] for name in runs[0].metric_names if name.startswith("time/") and name != "time/step"]
    # In the Gantt chart's order, so that a stage has one color on the page.
    order = dict.fromkeys([*stage_order(runs[0].timeline), *timed])
    by_stage = [Series(stage, runs[0].points(f"time/{stage}"), color=color) for color, stage in enumerate(order)]
    stages = Chart("Seconds by stage", by_stage, "s" if len(runs) == 1 else f"s, {runs[0].name}")
    return _filled([charts[0], _of_steps(stages), *_wait_charts(runs), charts[1]])


def _wait_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Return charts of the first run's waits by stage, and their share hidden by other stages."""
    start = "fusion/waited_seconds/"
    stages = [name.removeprefix(start) for name in runs[0].metric_names if name.startswith(start)]
    whose = "" if len(runs) == 1 else f", {runs[0].name}"
    return [
        Chart(
            f"Waits of {stage}",
            _named(runs[0], {"waited": start + stage, "hidden by other stages": f"fusion/hidden_seconds/{stage}"}),
            f"s, all ranks{whose}",
        )
        for stage in stages
    ] + [_metric_chart(runs, "Waits that other stages hid", "share of seconds", "fusion/hidden_share")]


def _of_steps(chart: Chart) -> Chart:
    """Drop step 0: the evaluation before the first step, and in older runs the whole start too."""
    return replace(chart, series=[replace(one, points=[at for at in one.points if at[0] >= 1]) for one in chart.series])


def traffic_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Return charts of the first run's sample and resharding bytes, moving times, and rates."""
    first = runs[0]
    return _filled(
        [
            _byte_chart("Sample bytes by link", _named(first, LINKS)),
            _byte_chart("Weights received from other ranks", _named(first, RESHARDING)),
            _metric_chart(runs, "Moving the weights", "s, slowest rank", "reshard/seconds"),
            Chart("Resharding rates", _named(first, RESHARDING_RATES), "GB/s, mean of ranks"),
        ]
    )


def detail_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Return charts of other learning metrics: records of algorithms, roles or environments."""
    return _filled([_metric_chart(runs, name, "", name) for name in _others(runs) if not name.startswith(MACHINERY)])


def machinery_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Return all other metrics that no other section shows."""
    return _filled([_metric_chart(runs, name, "", name) for name in _others(runs) if name.startswith(MACHINERY)])


def _others(runs: Sequence[RunData]) -> list[str]:
    known = {metric for _, _, metric in (*LEARNING, *SPEED)} | {"reward_p10", "reward_p90", "reshard/seconds"}
    known |= {*LINKS.values(), *RESHARDING.values(), *RESHARDING_RATES.values()}
    known |= {name for run in runs for name in run.metric_names if PART.fullmatch(name)}
    elsewhere = (LAGS, "time/", "fusion/", "eval/", "dock/put_bytes/", "dock/get_bytes/")
    names = {name for run in runs for name in run.metric_names} - known
    return sorted(name for name in names if not name.startswith(elsewhere))


def _metric_chart(runs: Sequence[RunData], title: str, unit: str, metric: str) -> Chart:
    series = [Series(run.name, run.points(metric), _band(run, metric), color=color) for color, run in enumerate(runs)]
    has_percentiles = metric == "reward" and any(one.band for one in series)
    return Chart(title, series, f"{unit}, 10th to 90th percentile" if has_percentiles else unit)


def _named(run: RunData, metrics: Mapping[str, str]) -> list[Series]:
    """Return metrics of one run under these labels."""
    return [Series(label, run.points(name), color=color) for color, (label, name) in enumerate(metrics.items())]


def _eval_charts(runs: Sequence[RunData]) -> list[Chart]:
    names = sorted({name for run in runs for name in run.metric_names if name.startswith("eval/")})
    # pass@8 before pass@16.
    names.sort(key=lambda name: (name.rstrip("0123456789"), len(name)))
    plain = {name: name.removeprefix("eval/").replace(AT_K, "pass@") for name in names}
    shown = {name: title for name, title in plain.items() if not name.endswith(("_low", "_high"))}
    # The mean of rewards that are only 0 or 1 is their accuracy.
    if "eval/reward" in shown and all(run.points("eval/reward") == run.points("eval/accuracy") for run in runs):
        del shown["eval/reward"]
        shown["eval/accuracy"] = "accuracy and reward"
    return [_metric_chart(runs, f"Evaluation: {title}", "", name) for name, title in shown.items()]


def _band(run: RunData, metric: str) -> list[tuple[float, float, float]]:
    """Return the 10th to 90th percentile of the reward, or another metric's recorded interval."""
    ends = ("reward_p10", "reward_p90") if metric == "reward" else (f"{metric}_low", f"{metric}_high")
    if ends[0] not in run.metric_names:
        return []
    band = []
    for step, values in run.metrics.items():
        if metric in values:
            low, high = (values.get(name, math.nan) for name in ends)
            band.append((float(step), low, high))
    finite = [edge for edge in band if all(map(math.isfinite, edge))]
    # Percentiles of rewards that are 0 or 1 are mostly 0 or 1 too, and add nothing to the mean.
    num_extreme = sum(end in (0.0, 1.0) for _, *ends_at in finite for end in ends_at)
    is_flat = metric == "reward" and num_extreme >= 0.9 * 2 * len(finite)
    return [] if is_flat else finite


def _lag_chart(run: RunData) -> Chart:
    """Chart each step's tokens by age in policy versions; empty if all were new."""
    lags = sorted(int(name.removeprefix(LAGS)) for name in run.metric_names if name.startswith(LAGS))
    labels = {f"{lag} versions": f"{LAGS}{lag}" for lag in lags} if lags != [0] else {}
    return Chart("Tokens by age", _named(run, labels), "tokens")


def _byte_chart(title: str, series: Sequence[Series]) -> Chart:
    values = [abs(y) for one in series for _, y in one.points if math.isfinite(y)]
    scale, unit = byte_unit(max(values, default=0.0))
    scaled = [replace(one, points=[(x, y / scale) for x, y in one.points]) for one in series]
    return Chart(title, scaled, f"{unit} per step")


def _filled(charts: Sequence[Chart]) -> list[Chart]:
    """Return the charts that have values, without their empty series."""
    kept = [Chart(chart.title, [one for one in chart.series if has_values(one)], chart.unit) for chart in charts]
    return [chart for chart in kept if chart.series]
