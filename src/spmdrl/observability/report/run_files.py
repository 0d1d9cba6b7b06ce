"""The files of a run's folder that the report reads, each of which may be missing or truncated by a crash."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from spmdrl.observability.alert_log import ALERTS_FILE
from spmdrl.observability.jsonl import read_jsonl, read_object
from spmdrl.observability.log import CHECKPOINTS_FILE, METRICS_FILE, SAMPLES_FILE, read_metrics
from spmdrl.observability.report.config_diff import RESOLVED_CONFIG, changed_settings
from spmdrl.observability.summary import SUMMARY_FILE, read_summary
from spmdrl.observability.timeline import TimelineRecords, read_timeline

# A run that ended early leaves only some of them.
_ANY_OF_A_RUN = (METRICS_FILE, RESOLVED_CONFIG, SUMMARY_FILE, SAMPLES_FILE, CHECKPOINTS_FILE, "timeline")
PLAN_FILE = "plan.json"
GOOD_VERDICTS = ("ok", "done", "passed", "finished", "completed", "success")
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class RunData:
    """Contents of one run's files."""

    run_dir: Path
    metrics: dict[int, dict[str, float]]
    """Metrics in step order; the later line of a step written twice."""
    timeline: TimelineRecords
    checkpoints: list[dict[str, Any]]
    """step, seconds, bytes, folder or None, error"""
    kept: frozenset[str]
    """names of existing checkpoint folders"""
    alerts: list[dict[str, Any]]
    """step, symptom, text, rule, page"""
    summary: dict[str, Any]
    plan: dict[str, Any]
    """plan of the run, made before its first step; empty without one"""
    config: str
    changes: list[tuple[int, str]]
    """steps after which a setting changed, with the change"""

    @property
    def name(self) -> str:
        return self.run_dir.name

    def points(self, metric: str) -> Points:
        """Return (step, value) of all steps with the metric."""
        return [(float(step), values[metric]) for step, values in self.metrics.items() if metric in values]

    @cached_property
    def metric_names(self) -> list[str]:
        return sorted({name for values in self.metrics.values() for name in values})


def read_run(run_dir: Path) -> RunData:
    """Read a run's folder. Raises FileNotFoundError if it is missing or has no files of a run."""
    folder = Path(run_dir).resolve()
    if not folder.is_dir():
        raise FileNotFoundError(f"{run_dir} is no folder; give the run.dir of a run, which holds metrics.jsonl")
    if any(folder.iterdir()) and not is_run(folder):
        raise FileNotFoundError(f"{run_dir} is no run's folder: it holds none of {', '.join(_ANY_OF_A_RUN)}")
    by_step, until = dict(read_metrics(folder)), sorted(folder.glob("config.resolved.step_*.yaml"))
    configs = [text_of(path) for path in [*until, folder / RESOLVED_CONFIG]]
    return RunData(
        run_dir=folder,
        metrics={step: by_step[step] for step in sorted(by_step)},
        timeline=read_timeline(folder / "timeline"),
        checkpoints=list(read_jsonl(folder / CHECKPOINTS_FILE)),
        kept=frozenset(path.name for path in folder.glob("checkpoints/step_*")),
        alerts=list(read_jsonl(folder / ALERTS_FILE)),
        summary=read_summary(folder),
        plan=read_object(folder / PLAN_FILE),
        config=configs[-1],
        changes=[
            (int(path.stem[-6:]), f"{key} {old} → {new}")
            for path, (before, after) in zip(until, pairwise(configs), strict=True)
            for key, old, new in changed_settings(before, after)
        ],
    )


def is_run(folder: Path) -> bool:
    """Return True if a folder has any of the files of a run."""
    return any((folder / name).exists() for name in _ANY_OF_A_RUN)


def text_of(path: Path) -> str:
    """Return a file's text; empty if it is missing."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
