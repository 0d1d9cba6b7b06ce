"""The resolved configuration of a run's folder, and what it was before the run went on with others."""

from __future__ import annotations

from pathlib import Path

from spmdrl.job.run.resuming import ResumePoint
from spmdrl.observability.jsonl import write_atomic
from spmdrl.observability.report.config_diff import RESOLVED_CONFIG, changed_settings
from spmdrl.observability.terminal.console import Console


def keep_config(resolved: str, folder: Path, point: ResumePoint | None, console: Console, *, is_finished: bool) -> None:
    """Write the resolved configuration; where it changed at the point, print how, and keep the earlier one too.

    A run that is finished keeps its own.
    """
    path = folder / RESOLVED_CONFIG
    if point is not None:
        step, source = point.record.step, point.folder / RESOLVED_CONFIG
        before = source.read_text(encoding="utf-8", errors="replace") if source.is_file() else ""
        changes = list(changed_settings(before, resolved))
        for key, old, new in changes:
            console.note(
                f"{key} was {old} in all of the run: {new} has no effect"
                if is_finished
                else f"{key} was {old} until step {step} and is {new} from here"
            )
        if is_finished:
            return
        if changes:
            write_atomic(folder / resolved_config_until(step), before)
    write_atomic(path, resolved)


def resolved_config_until(step: int) -> str:
    """The name of the file with the configuration that a run had until a step."""
    return f"config.resolved.step_{step:06d}.yaml"
