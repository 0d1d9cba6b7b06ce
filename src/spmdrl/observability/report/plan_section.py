"""The plan of a run, as lines for a screen and as a table beside what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

from spmdrl.observability.report.page import Parts, Table, value_text
from spmdrl.observability.report.run_files import RunData
from spmdrl.observability.terminal.units import bytes_text, time_text


def plan_lines(plan: Mapping[str, Any]) -> list[str]:
    """Return the verdict of a plan, and its times if the device has rates."""
    fullest = plan["ranks"][0]
    states = {state: sum(owners.values()) for state, owners in fullest["slots"].items()}
    lines = [
        f"{'fits' if plan['fits'] else 'does not fit'}: {bytes_text(fullest['peak_bytes'])} of "
        f"{bytes_text(plan['device_bytes'])} on {plan['device']}, in the {max(states, key=states.__getitem__)} of rank "
        f"{fullest['rank']}"
    ]
    if "step_seconds" in plan:
        rate = plan["tokens_per_second_per_device"]
        lines.append(f"{time_text(plan['step_seconds'])} per step, {rate:.4g} tokens per second and device")
    return lines


def planned_beside_measured(run: RunData) -> Parts:
    """Return a table of the plan's times and peaks beside the run's; nothing if they have none in common."""
    if not run.plan:
        return []
    plan = run.plan
    stages = {**plan.get("stages", {}), "step": plan.get("step_seconds", 0.0)}
    compared = [(f"{name}, seconds", seconds, _typical(run, f"time/{name}")) for name, seconds in stages.items()]
    rate = "perf/eq5_tokens_per_second_per_device"
    rate_planned = plan.get("tokens_per_second_per_device", 0.0)
    compared.append(("tokens per second and device", rate_planned, _typical(run, rate)))
    for state, peak in _peaks(plan).items():
        measured = max((value for _, value in run.points(f"mem/{state}_peak_gib")), default=None)
        compared.append((f"{state}, peak in GiB", peak / (1 << 30), measured))
    rows = [
        (what, value_text(planned), value_text(measured), value_text(measured / planned))
        for what, planned, measured in compared
        if planned and measured is not None
    ]
    note = (
        f"Planned: {'; '.join(plan_lines(plan))}. Measured: times and rates are medians of the steps after the first, "
        "peaks the most of any step and rank."
    )
    return [Table(("what", "planned", "measured", "measured / planned"), rows, note=note)] if rows else []


def _typical(run: RunData, metric: str) -> float | None:
    values = [value for step, value in run.points(metric) if step > 1 and math.isfinite(value)]
    return median(values) if values else None


def _peaks(plan: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes of each worker state on the rank that has most."""
    peaks: dict[str, int] = {}
    for rank in plan["ranks"]:
        for state, owners in rank["slots"].items():
            peaks[state] = max(peaks.get(state, 0), sum(owners.values()))
    return peaks
