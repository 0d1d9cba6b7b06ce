"""The plan of a run: lines for a screen, a table beside what was measured, and a picture of memory and seconds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from statistics import median
from typing import Any

from markupsafe import escape

from spmdrl.observability.report.charts import ticks
from spmdrl.observability.report.page import Parts, Table, value_text
from spmdrl.observability.report.run_files import RunData
from spmdrl.observability.terminal.units import byte_unit, bytes_text, time_text

_COLORS = (
    "#3f7ae0", "#e07b2e", "#2aa376", "#c94a86", "#8a68d8", "#b8941f", "#3aa5bd", "#d05a5a", "#7d9a3a", "#8b919b",
    "#2f4b7c", "#a05a2c", "#145f43", "#f2a6c4",
)  # fmt: skip
_STYLE = (
    "<style>text{font:12px sans-serif;fill:#333}.grid{stroke:#e4e4e4}.bar{stroke:#fff;stroke-width:.5}"
    ".room{stroke:#c02b3c;stroke-dasharray:6 4}</style>"
)
_LEFT, _TOP, _WIDTH, _HEIGHT = 70, 40, 520, 280


def plan_lines(plan: Mapping[str, Any]) -> list[str]:
    """Return the verdict of a plan, its times if the device has rates, and notes."""
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
    refused = [f"{part} would be refused: {reason}" for part, reason in plan.get("refusals", {}).items()]
    return [*lines, *refused, *plan.get("notes", [])]


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


def plan_svg(plan: Mapping[str, Any]) -> str:
    """Draw what `Plan.to_json` returns: the fullest rank's memory, and seconds if the device has rates."""
    slots = plan["ranks"][0]["slots"]
    present = dict.fromkeys(owner for held in slots.values() for owner, size in held.items() if size)
    owners = sorted(present, key=lambda owner: -max(held.get(owner, 0) for held in slots.values()))
    bottom, (verdict, *others) = _TOP + _HEIGHT, plan_lines(plan)
    rates = others[:1] if "step_seconds" in plan else []
    parts = [_text(_LEFT, 20, verdict), *_memory(slots, owners, plan["device_bytes"])]
    for number, (owner, color) in enumerate(zip(owners, cycle(_COLORS), strict=False)):
        y = _TOP + 18 * number
        parts.append(f'<rect x="{_LEFT + _WIDTH + 20}" y="{y}" width="11" height="11" fill="{color}"/>')
        parts.append(_text(_LEFT + _WIDTH + 37, y + 10, owner.replace("_", " ")))
    if rates:
        parts += _text(_LEFT, bottom + 50, *rates), *_step(plan["stages"], y=bottom + 60)
    width, height = _LEFT + _WIDTH + 190, max(bottom + 30 + 100 * len(rates), _TOP + 18 * len(owners))
    size, background = f'width="{width}" height="{height}"', '<rect width="100%" height="100%" fill="#fff"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {size}>{_STYLE}{background}'
        f"{''.join(parts)}</svg>\n"
    )


def _memory(slots: Mapping[str, Mapping[str, int]], owners: Sequence[str], room: int) -> Iterator[str]:
    """Yield a stacked bar for each part of a step, and a line at the device's memory."""
    bottom, most = _TOP + _HEIGHT, max(room, *(sum(held.values()) for held in slots.values()))
    scale, (unit_bytes, unit), pitch = (_HEIGHT - 20) / most, byte_unit(most), _WIDTH / len(slots)
    for value in ticks(0.0, most / unit_bytes):
        y = bottom - value * unit_bytes * scale
        yield f'<line class="grid" x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text(_LEFT - 6, y + 4, f"{value:g} {unit}", "end")
    for place, (name, held) in enumerate(slots.items()):
        x, top = _LEFT + (place + 0.2) * pitch, float(bottom)
        for owner, color in zip(owners, cycle(_COLORS), strict=False):
            if size := held.get(owner, 0):
                top -= size * scale
                box = f'x="{x:.1f}" y="{top:.3f}" width="{0.6 * pitch:.1f}" height="{size * scale:.3f}"'
                yield _bar(box, color, f"{name}, {owner}: {bytes_text(size)}")
        yield _text(x + 0.3 * pitch, top - 5, bytes_text(sum(held.values())), "middle")
        yield _text(x + 0.3 * pitch, bottom + 16, name, "middle")
    y = bottom - room * scale
    yield f'<line class="room" x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
    yield _text(_LEFT + _WIDTH, y - 5, f"the device's {bytes_text(room)}", "end")


def _step(stages: Mapping[str, float], y: int) -> Iterator[str]:
    """Yield one bar of the step's parts, with their names in two rows where these have room."""
    x, whole, ends = float(_LEFT), sum(stages.values()), [0.0, 0.0]
    for (name, seconds), color in zip(stages.items(), cycle(_COLORS[::-1]), strict=False):
        width, text = seconds / whole * _WIDTH, f"{name} {time_text(seconds)}"
        yield _bar(f'x="{x:.3f}" y="{y}" width="{width:.3f}" height="20"', color, text)
        row = ends.index(min(ends))
        if width > 3 and x >= ends[row]:
            yield _text(x, y + 34 + 16 * row, text)
            ends[row] = x + 7 * len(text)
        x += width


def _bar(box: str, color: str, title: str) -> str:
    return f'<rect class="bar" {box} fill="{color}"><title>{escape(title)}</title></rect>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
