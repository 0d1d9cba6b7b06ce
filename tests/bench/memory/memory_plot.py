"""The memory bench's curves as one SVG: the ledger stacked by owner, and resident memory as a line above it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from spmdrl.observability.report.charts import ticks
from spmdrl.observability.terminal.units import byte_unit
from tests.bench.memory.memory_ranks import Look

Phases = Mapping[str, Sequence[Look]]

_PHASE_WIDTH, _HEIGHT = 76, 240
_LEFT, _TOP, _GAP, _BOTTOM = 60, 34, 30, 56
_LOOKS_PER_PHASE = 60
_COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#997755")
_STYLE = "text{font:11px sans-serif;fill:#333}.grid{stroke:#ddd}.resident{fill:none;stroke:#111;stroke-width:1.5}"


def memory_svg(curves: Mapping[str, Phases]) -> str:
    """One panel per curve, on one scale; all phases are equally wide, however long they took."""
    looks = [look for phases in curves.values() for some in phases.values() for look in some]
    peak = max(max(look.resident, sum(look.ledger.values())) for look in looks)
    owners = [owner for owner in looks[0].ledger if any(look.ledger[owner] for look in looks)]
    num_phases = max(map(len, curves.values()))
    panel = num_phases * _PHASE_WIDTH + _GAP
    width, height = _LEFT + len(curves) * panel, _TOP + _HEIGHT + _BOTTOM
    parts = [_axis(peak, width)]
    for number, (name, phases) in enumerate(curves.items()):
        parts.append(_panel(name, phases, owners, x=_LEFT + number * panel, scale=_HEIGHT / peak))
    parts.append(_legend(owners, y=height - 10))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _axis(peak: int, width: int) -> str:
    scale, unit = byte_unit(peak)
    parts = []
    for value in ticks(0.0, peak / scale):
        y = _TOP + _HEIGHT - value * scale * _HEIGHT / peak
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{width - _GAP}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g} {unit}</text>')
    return "".join(parts)


def _panel(name: str, phases: Phases, owners: Sequence[str], *, x: int, scale: float) -> str:
    parts = [f'<text x="{x}" y="{_TOP - 14}" font-weight="bold">{escape(name)}</text>']
    places: list[float] = []
    shown: list[Look] = []
    for number, (phase, looks) in enumerate(phases.items()):
        left = x + number * _PHASE_WIDTH
        middle = left + _PHASE_WIDTH / 2
        parts.append(f'<text x="{middle:.1f}" y="{_TOP + _HEIGHT + 16}" text-anchor="middle">{escape(phase)}</text>')
        parts.append(f'<line class="grid" x1="{left}" x2="{left}" y1="{_TOP}" y2="{_TOP + _HEIGHT}"/>')
        chosen = _highest_of_stretches(looks)
        whole = max(looks[-1].seconds, 1e-9)
        places += [left + look.seconds / whole * _PHASE_WIDTH for look in chosen]
        shown += chosen
    bottoms = [0] * len(shown)
    for color, owner in zip(_COLORS, owners, strict=False):
        tops = [bottom + look.ledger[owner] for bottom, look in zip(bottoms, shown, strict=True)]
        outline = [*zip(places, tops, strict=True), *reversed(list(zip(places, bottoms, strict=True)))]
        parts.append(f'<polygon points="{_points(outline, scale)}" fill="{color}"/>')
        bottoms = tops
    line = [(place, look.resident) for place, look in zip(places, shown, strict=True)]
    return "".join([*parts, f'<polyline class="resident" points="{_points(line, scale)}"/>'])


def _highest_of_stretches(looks: Sequence[Look]) -> list[Look]:
    """The first and the last look, and between them the highest of each stretch, so that peaks stay."""
    stride = -(-len(looks) // _LOOKS_PER_PHASE)
    stretches = [looks[start : start + stride] for start in range(1, len(looks) - 1, stride)]
    return [looks[0], *(max(stretch, key=lambda look: look.resident) for stretch in stretches), looks[-1]]


def _points(points: Sequence[tuple[float, int]], scale: float) -> str:
    return " ".join(f"{x:.1f},{_TOP + _HEIGHT - amount * scale:.1f}" for x, amount in points)


def _legend(owners: Sequence[str], *, y: int) -> str:
    parts, x = [], _LEFT
    for color, owner in zip(_COLORS, owners, strict=False):
        parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{color}"/>')
        parts.append(f'<text x="{x + 14}" y="{y}">{escape(owner)}</text>')
        x += 30 + 6 * len(owner)
    return "".join([*parts, f'<text x="{x}" y="{y}">line: resident</text>'])
