"""The parts of the page that are text: header, comparison of runs, health, configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from spmdrl.observability.health import at_ends
from spmdrl.observability.jsonl import number
from spmdrl.observability.report.config_diff import differing, settings_of
from spmdrl.observability.report.page import ConfigText, Header, Parts, Table, value_text
from spmdrl.observability.report.run_files import GOOD_VERDICTS, RunData
from spmdrl.observability.summary import passes_of
from spmdrl.observability.terminal.console import best_text, outcome
from spmdrl.observability.terminal.units import bytes_text, count, duration
from spmdrl.runtime.supervision.holder import is_held

COMPARED = ("run", "steps", "reward, sampled", "held-out reward", "held-out accuracy", "tokens/s", "time", "verdict")
REWARD_ERRORS = "reward/errors/"
MAX_LISTED = 12


def header(run: RunData) -> Header:
    verdict = verdict_of(run)
    tone = "good" if verdict.lower() in GOOD_VERDICTS else "open" if verdict.startswith("unfinished") else "bad"
    facts = {
        "Steps": str(run.summary.get("steps") or max(run.metrics, default=0)),
        "Reward": _change(run, "reward"),
        "Held-out reward": _change(run, "eval_reward"),
        "Accuracy": _change(run, "accuracy"),
        **{name: _change(run, key) for name, key in passes_of(run.summary).items()},
        "Time": _seconds_text(run.summary.get("seconds")),
        "Start-up": _seconds_text(run.summary.get("startup_seconds")),
        "Per step": _pace(run),
        "Devices": _plain(run.summary.get("devices")),
        "Model": _model(run),
        "Versions": _plain(run.summary.get("versions")),
        "Commit": _plain(run.summary.get("commit")),
        "Host": _plain(run.summary.get("host")),
        "Started": _plain(run.summary.get("started")),
        "Command": _plain(run.summary.get("command")),
        "Checkpoint": _plain(run.summary.get("checkpoint")),
        "Best checkpoint": best_text(run.summary),
    }
    shown = ("symptom", "step", "text", "rule", "page")
    newest = {str(alert.get("symptom")): {name: str(alert.get(name, "")) for name in shown} for alert in run.alerts}
    return Header(run.name, verdict, tone, facts, list(newest.values()))


def _model(run: RunData) -> str:
    size = number(run.summary.get("parameters"))
    return "" if size is None else f"{count(size)} parameters"


def verdict_of(run: RunData) -> str:
    """Return the summary's verdict; a run without one is still running if its folder is held, else killed."""
    verdict = run.summary.get("verdict")
    if verdict not in (None, "running"):
        return outcome(run.summary)
    return "unfinished: still running" if is_held(run.run_dir) else "unfinished: killed, it ended without a message"


def comparison(runs: Sequence[RunData]) -> Parts:
    """Return a table with a row per run, and differing settings; nothing for a single run."""
    if len(runs) < 2:
        return []
    note = f"Curves show every run; all other parts show {runs[0].name}."
    rows = [(key, *values) for key, values in differing([settings_of(run.config) for run in runs]).items()]
    settings = Table(("key", *(run.name for run in runs)), rows, "Settings that differ")
    return [Table(COMPARED, compared(runs), note=note), *([settings] if rows else [])]


def compared(runs: Sequence[RunData]) -> list[tuple[str, ...]]:
    """Return the cells of each run in the comparison."""
    return [
        (run.name, str(max(run.metrics, default=0)), _change(run, "reward"), _change(run, "eval_reward"),
         _change(run, "accuracy"), _throughput(run), _seconds_text(run.summary.get("seconds")), verdict_of(run))
        for run in runs
    ]  # fmt: skip


def _throughput(run: RunData) -> str:
    rates = [rate for _, rate in run.points("perf/tokens_per_second") if math.isfinite(rate)]
    return count(median(rates)) if rates else ""


def health(run: RunData) -> Parts:
    """Return tables of errors, omissions and checkpoints."""
    rows = [
        ("Warnings", *_counted(run, "log/warnings".__eq__)),
        ("Skipped updates", *_counted(run, lambda name: name.split("/")[-1] == "skipped")),
        ("Steps in which all advantages were 0", *_steps_where(run, lambda one: one.get("frac_advantage_zero") == 1)),
        ("Loss or gradient not finite", *_steps_where(run, _is_broken)),
        ("Rows dropped", *_counted(run, lambda name: name == "dock/dropped")),
    ]
    kinds = [name for name in run.metric_names if name.startswith(REWARD_ERRORS)]
    for kind in kinds:
        rows.append((f"Reward errors: {kind.removeprefix(REWARD_ERRORS)}", *_counted(run, kind.__eq__)))
    if not kinds:
        rows.append(("Reward errors", "0", ""))
    failed = [span for span in run.timeline.spans if span.error]
    where = [f"{span.stage} of step {span.step} on rank {span.rank} ({span.error})" for span in failed]
    rows.append(("Stages that raised", str(len(failed)), _listed(where)))
    changes = [f"after step {step}: {text}" for step, text in run.changes]
    rows.append(("Settings changed on resume", str(len(changes)), _listed(changes)))
    rows.append(("Checkpoints written", *_checkpoints(run)))
    return [Table(("what", "count", "where"), rows)]


def configuration(run: RunData) -> Parts:
    lines = [line.partition(" # ") for line in run.config.splitlines()]
    return [ConfigText([(setting, origin.strip()) for setting, _, origin in lines])] if lines else []


def _change(run: RunData, what: str) -> str:
    """Return first and last value from the summary; for an unfinished run, the reward from its metrics."""
    if what == "accuracy" and run.summary.get("rewards_are_verdicts") is False:
        return ""
    first_name, last_name = ("reward_first", "reward_last") if what == "reward" else (f"{what}_before", f"{what}_after")
    first, last = number(run.summary.get(first_name)), number(run.summary.get(last_name))
    if first is None and last is None and what == "reward" and run.points(what):
        first, last = (one.value for one in at_ends(list(run.metrics.values()), what)[:2])
    if first is None and last is None:
        return ""
    return " → ".join(
        "?" if value is None else value_text(value) + _interval(run.summary.get(f"{name}_interval"))
        for name, value in ((first_name, first), (last_name, last))
    )


def _interval(value: object) -> str:
    ends = [number(end) for end in value] if isinstance(value, list) else []
    return f" [{ends[0]:.3g}, {ends[1]:.3g}]" if len(ends) == 2 and None not in ends else ""


def _seconds_text(value: object) -> str:
    seconds = number(value)
    return "" if seconds is None else duration(seconds)


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {inner}" for name, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def _counted(run: RunData, wanted: Any) -> tuple[str, str]:
    """Return the sum of the wanted metrics over the run, and the steps where it isn't 0."""
    names = list(filter(wanted, run.metric_names))
    at_step = {
        step: sum(values[name] for name in names if math.isfinite(values.get(name, math.nan)))
        for step, values in run.metrics.items()
    }
    return f"{sum(at_step.values()):g}", _steps_text([step for step, amount in at_step.items() if amount])


def _is_broken(metrics: Mapping[str, float]) -> bool:
    return any(not math.isfinite(metrics.get(name, 0.0)) for name in ("loss", "grad_norm"))


def _steps_where(run: RunData, holds: Callable[[Mapping[str, float]], bool]) -> tuple[str, str]:
    steps = [step for step, values in run.metrics.items() if holds(values)]
    return str(len(steps)), _steps_text(steps)


def _checkpoints(run: RunData) -> tuple[str, str]:
    """Return the checkpoints' steps, those that still exist, and failed ones."""
    written = [one for one in run.checkpoints if isinstance(one.get("step"), int) and not one.get("error")]
    failed = [one["step"] for one in run.checkpoints if isinstance(one.get("step"), int) and one.get("error")]
    kept = [one["step"] for one in written if one.get("folder") in run.kept]
    texts = [_steps_text([one["step"] for one in written])] if written else []
    texts += [f"still there: {_listed([str(step) for step in kept])}"] if kept else []
    texts += [f"FAILED: {_listed([str(step) for step in failed])}"] if failed else []
    size = number(written[-1].get("bytes")) if written else None
    texts += [f"the last holds {bytes_text(size)}"] if size is not None and math.isfinite(size) else []
    return str(len(written)), "; ".join(texts)


def _pace(run: RunData) -> str:
    """Return the median of the steps, apart from what comes before the first one."""
    seconds = [value for step, value in run.points("time/step") if step >= 1 and math.isfinite(value)]
    return f"{duration(median(seconds))} (median)" if seconds else ""


def _steps_text(steps: Sequence[int]) -> str:
    return f"step {_listed([str(step) for step in steps])}" if steps else ""


def _listed(items: Sequence[str]) -> str:
    hidden = len(items) - MAX_LISTED
    return ", ".join(items[:MAX_LISTED]) + (f" and {hidden} more" if hidden > 0 else "")
