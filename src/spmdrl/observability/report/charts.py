"""Line charts as inline SVG, complete without a script; with one, they show values and ranges of steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

Points = Sequence[tuple[float, float]]
Band = Sequence[tuple[float, float, float]]

WIDTH, HEIGHT = 440, 210
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 10, 24
PLOT = (
    f'x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" height="{HEIGHT - TOP - BOTTOM}" '
    f'viewBox="{LEFT} {TOP} {WIDTH - LEFT - RIGHT} {HEIGHT - TOP - BOTTOM}"'
)
NUM_COLORS = 10
MAX_POINTS = 400
DOTS_UP_TO = 40
SMOOTHED_FROM = 150
MEAN_POINTS = 150


@dataclass(frozen=True)
class Series:
    """A named line, with an optional band of (x, low, high) around it."""

    label: str
    points: Points
    band: Band = ()
    color: int = 0


@dataclass(frozen=True)
class Chart:
    """Lines over the same x axis, the training step."""

    title: str
    series: list[Series]
    unit: str = ""
    marks: Sequence[float] = ()
    """steps marked by a vertical line"""

    @property
    def legend(self) -> list[tuple[int, str]]:
        """Colors and labels; a single line needs none."""
        return [(series.color, series.label) for series in self.series] if len(self.series) > 1 else []


@dataclass(frozen=True)
class Frame:
    """Ranges of a chart's axes, and positions of values in the SVG."""

    x: tuple[float, float]
    y: tuple[float, float]

    def px(self, x: float) -> float:
        return LEFT + (x - self.x[0]) / (self.x[1] - self.x[0]) * (WIDTH - LEFT - RIGHT)

    def py(self, y: float) -> float:
        y = min(max(y, self.y[0]), self.y[1])
        return HEIGHT - BOTTOM - (y - self.y[0]) / (self.y[1] - self.y[0]) * (HEIGHT - TOP - BOTTOM)


def color_class(index: int) -> str:
    """Return the CSS class of the color with this index."""
    return f"k{index % NUM_COLORS}"


def chart_svg(chart: Chart) -> Markup:
    """Draw axes and lines; data attributes let the script draw a range of steps."""
    xs = [x for series in chart.series for x, _ in series.points]
    x_range = _widened(min(xs), max(xs), 0.5) if min(xs) == max(xs) else (min(xs), max(xs))
    frame = Frame(x_range, _y_range(chart.series))
    marks = [f"M{frame.px(x):.2f} {TOP}V{HEIGHT - BOTTOM}" for x in chart.marks if frame.x[0] <= x <= frame.x[1]]
    lines = f'<path class="mark" d="{"".join(marks)}"/>' if marks else ""
    lines += "".join(_series_svg(series, frame) for series in chart.series)
    return Markup(  # noqa: S704
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}" '
        f'data-steps="{frame.x[0]:.10g} {frame.x[1]:.10g}" data-values="{frame.y[0]:.10g} {frame.y[1]:.10g}" '
        f'data-pixels="{LEFT} {WIDTH - RIGHT} {TOP} {HEIGHT - BOTTOM} {WIDTH}">'
        f'<g class="axes">{_axes_svg(frame)}</g><svg class="plot" {PLOT}><g>{lines}</g></svg>'
        f'<line class="cross" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>'
    )


def chart_data(chart: Chart) -> list[dict[str, Any]]:
    """Return the script's data for showing values: each series' label, x, and y in four digits."""
    data = []
    for series in chart.series:
        points = [(x, float(f"{y:.4g}")) for x, y in downsample(series.points) if math.isfinite(y)]
        x, y = [x for x, _ in points], [y for _, y in points]
        data.append({"label": series.label, "color": color_class(series.color), "x": x, "y": y})
    return data


def downsample(points: Points, limit: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Return at most `limit` points in order: the lowest and the highest of each stretch, so peaks stay."""
    if len(points) <= limit:
        return list(points)
    values = [y for _, y in points]
    num_stretches = limit // 2 - 1
    kept = {0, len(points) - 1}
    for stretch in range(num_stretches):
        window = range(stretch * len(points) // num_stretches, (stretch + 1) * len(points) // num_stretches)
        finite = [at for at in window if math.isfinite(values[at])]
        if finite:
            kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
        else:
            kept.add(window[0])
    return [points[at] for at in sorted(kept)]


def moving_mean(points: Points) -> list[tuple[float, float]]:
    """Return means over windows of a twenty-fifth of a long noisy curve, at evenly spread places."""
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    values = [_drawable(y) for _, y in finite]
    reach, stride = max(1, len(finite) // 50), max(1, len(finite) // MEAN_POINTS)
    places = sorted({*range(0, len(finite), stride), len(finite) - 1} if finite else ())
    windows = ((at, values[max(0, at - reach) : at + reach + 1]) for at in places)
    return [(finite[at][0], sum(window) / len(window)) for at, window in windows]


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round values between `low` and `high`, in steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{at * step:.12g}") for at in range(first, last + 1)]


def has_values(series: Series) -> bool:
    return any(math.isfinite(y) for _, y in series.points)


def _y_range(all_series: Iterable[Series]) -> tuple[float, float]:
    values = [value for series in all_series for _, *rest in (*series.points, *series.band) for value in rest]
    finite = [_drawable(value) for value in values if math.isfinite(value)]
    if not finite:
        return 0.0, 1.0
    low, high = min(finite), max(finite)
    # Almost equal values need a range in which the axis' six digits still differ.
    if high - low <= 1e-5 * max(abs(low), abs(high)):
        return _widened(low, high, 0.5 * max(abs(low), abs(high)) or 0.5)
    # Start the axis at 0 unless that flattens the line.
    if 0 < low < 0.4 * high:
        low = 0.0
    margin = 0.05 * (high - low)
    return low - (margin if low != 0 else 0.0), high + margin


def _drawable(value: float) -> float:
    # Beyond 1e300 differences and sums would overflow.
    return max(-1e300, min(1e300, value))


def _widened(low: float, high: float, by: float) -> tuple[float, float]:
    return low - by, high + by


def _axes_svg(frame: Frame) -> str:
    parts = []
    for y in ticks(*frame.y):
        at = f"{frame.py(y):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text class="ty" x="{LEFT - 6}" y="{at}">{y:.6g}</text>')
    for x in filter(float.is_integer, ticks(*frame.x)):
        parts.append(f'<text class="tx" x="{frame.px(x):.1f}" y="{HEIGHT - 8}">{x:g}</text>')
    return "".join(parts)


def _series_svg(series: Series, frame: Frame) -> str:
    points = downsample(series.points)
    shown = {x for x, _ in points}
    runs = _finite_runs(points)
    mean = moving_mean(series.points) if len(series.points) >= SMOOTHED_FROM else []
    dotted = runs if len(points) <= DOTS_UP_TO else [run for run in runs if len(run) == 1]
    paths = [
        ("band", _band([edge for edge in series.band if edge[0] in shown], frame)),
        ("raw" if mean else "line", "".join(_path(run, frame) for run in runs if len(run) > 1)),
        ("line", _path(mean, frame)),
        # Strokes of no length are round where a stretched circle wouldn't be.
        ("dots", "".join(f"{_path([point], frame)}h0" for run in dotted for point in run)),
    ]
    drawn = "".join(f'<path class="{kind}" d="{path}"/>' for kind, path in paths if path)
    return f'<g class="{color_class(series.color)}">{drawn}</g>'


def _band(band: Band, frame: Frame) -> str:
    finite = [edge for edge in band if all(map(math.isfinite, edge))]
    outline = [(x, high) for x, _, high in finite] + [(x, low) for x, low, _ in reversed(finite)]
    return f"{_path(outline, frame)}Z" if len(finite) > 1 else ""


def _path(points: Points, frame: Frame) -> str:
    return "M" + "L".join(f"{frame.px(x):.2f} {frame.py(y):.2f}" for x, y in points) if points else ""


def _finite_runs(points: Points) -> list[list[tuple[float, float]]]:
    """Split points at gaps: a NaN breaks the line instead of hiding in it."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if math.isfinite(y):
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]
