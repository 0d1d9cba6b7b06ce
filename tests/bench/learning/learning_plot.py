"""Accuracy over steps as one SVG: a panel per algorithm, or per group of them, all on the same scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean

from spmdrl.observability.report.charts import ticks
from tests.bench.learning.learning_runs import LearningCurve

_COLUMNS, _WIDTH, _HEIGHT = 4, 190, 120
_LEFT, _TOP, _GAP_X, _GAP_Y = 40, 50, 16, 44
_CAPTION = "held-out accuracy by training step; line: mean of the seeds; band: lowest to highest"
_STYLE = "text{font:11px sans-serif;fill:#333}.grid{stroke:#ddd}.band{opacity:.25}.mean{fill:none;stroke-width:1.8}"
_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44")
"""of a panel's lines"""

Point = tuple[float, float]


def curves_svg(curves: Mapping[str, Sequence[LearningCurve]], *, caption: str = _CAPTION) -> str:
    """A line for the mean over an algorithm's seeds, and a band from the lowest to the highest of them.

    A panel has the curves of one algorithm, or of up to four, with the colours that they have in the fullest panel.
    """
    every = [curve for group in curves.values() for curve in group]
    values = [estimate.value for curve in every for estimate in curve.accuracies.values()]
    # Room above and below, also where nothing was learnt.
    scale = _Scale(min(values) - 0.02, max(values) + 0.02)
    colours = dict(
        zip(dict.fromkeys(curve.algorithm for curve in max(curves.values(), key=len)), _COLOURS, strict=False)
    )
    num_rows = -(-len(curves) // _COLUMNS)
    width = _LEFT + min(len(curves), _COLUMNS) * (_WIDTH + _GAP_X)
    height = _TOP + num_rows * (_HEIGHT + _GAP_Y)
    panels = []
    for number, (name, group) in enumerate(curves.items()):
        row, column = divmod(number, _COLUMNS)
        x, y = _LEFT + column * (_WIDTH + _GAP_X), _TOP + row * (_HEIGHT + _GAP_Y)
        panels.append(
            f'<g transform="translate({x} {y})">{_panel(name, group, scale, colours, has_labels=column == 0)}</g>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="{_LEFT}" y="16">{caption}</text>{"".join(panels)}</svg>\n'
    )


@dataclass(frozen=True)
class _Scale:
    """Where an accuracy after a share of all steps lies in a panel."""

    low: float
    high: float

    def at(self, share: float, accuracy: float) -> Point:
        return share * _WIDTH, (self.high - accuracy) / (self.high - self.low) * _HEIGHT


def _panel(
    name: str, curves: Sequence[LearningCurve], scale: _Scale, colours: Mapping[str, str], *, has_labels: bool
) -> str:
    lines: dict[str, list[LearningCurve]] = {}
    for curve in curves:
        lines.setdefault(curve.algorithm, []).append(curve)
    num_seeds = len(next(iter(lines.values())))
    seeds = f", {num_seeds} seeds" if num_seeds > 1 else ""
    parts = [f'<text y="-8"><tspan font-weight="bold">{escape(name)}</tspan>{seeds}</text>']
    for accuracy in ticks(scale.low, scale.high, about=4):
        _, y = scale.at(0, accuracy)
        parts.append(f'<line class="grid" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        if has_labels:
            parts.append(f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{accuracy:g}</text>')
    last = max(max(curve.accuracies) for curve in curves)
    parts.append(f'<text y="{_HEIGHT + 14}">0</text>')
    parts.append(f'<text x="{_WIDTH}" y="{_HEIGHT + 14}" text-anchor="end">{last}</text>')
    for number, (line, group) in enumerate(lines.items()):
        colour = colours.get(line, _COLOURS[0])
        if len(lines) > 1:
            label = f'x="4" y="{12 + 13 * number}" style="fill:{colour}"'
            parts.append(f"<text {label}>{escape(line)}</text>")
        by_step = {step: [curve.accuracies[step].value for curve in group] for step in sorted(group[0].accuracies)}
        lows = [scale.at(step / last, min(values)) for step, values in by_step.items()]
        highs = [scale.at(step / last, max(values)) for step, values in by_step.items()]
        means = [scale.at(step / last, fmean(values)) for step, values in by_step.items()]
        parts.append(f'<polygon class="band" fill="{colour}" points="{_points([*highs, *reversed(lows)])}"/>')
        parts.append(f'<polyline class="mean" stroke="{colour}" points="{_points(means)}"/>')
    return "".join(parts)


def _points(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
