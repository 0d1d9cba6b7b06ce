"""Gantt charts of all ranks, and memory by owner over the stages of the same steps, as inline SVG."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from spmdrl.observability.report.charts import color_class, ticks
from spmdrl.observability.report.page import Choices, Parts, Table, value_text
from spmdrl.observability.report.traffic_section import link_text
from spmdrl.observability.terminal.units import byte_unit, bytes_text
from spmdrl.observability.timeline import MemorySnapshot, Span, TimelineRecords

WIDTH, LEFT, RIGHT = 940, 64, 12
ROW_HEIGHT, AXIS_HEIGHT = 20, 22
BACKGROUND_HEIGHT = 4
MEMORY_HEIGHT, LABEL_HEIGHT = 230, 74
MAX_RANKS = 32
MAX_SPANS = 1500
NUM_SLOWEST = 2
NUM_SPREAD = 8


@dataclass(frozen=True)
class StepRange:
    """The steps of one view."""

    title: str
    steps: tuple[int, ...]


def step_ranges(records: TimelineRecords) -> list[StepRange]:
    """Return ranges of the first, slowest, last and evenly spread other steps; a single one where there are few."""
    seconds = step_seconds(records)
    steps = sorted(seconds)
    if not steps:
        steps = sorted({snapshot.step for snapshot in records.snapshots})
        return [StepRange("first steps", tuple(steps[:2]))] if steps else []
    if len(steps) <= 2:
        return [StepRange("all steps", tuple(steps))]
    slowest = sorted(steps[2:-2], key=lambda step: -seconds[step])[:NUM_SLOWEST]
    ranges = [StepRange(f"first: {_range_text(steps[:2])}", tuple(steps[:2]))]
    ranges += [StepRange(f"slow: {step} ({seconds[step]:.3g} s)", (step,)) for step in slowest]
    last = StepRange(f"last: {_range_text(steps[-2:])}", tuple(steps[-2:]))
    known = {step for one in (*ranges, last) for step in one.steps}
    rest = [step for step in steps if step not in known]
    spread = sorted({rest[at * (len(rest) - 1) // (NUM_SPREAD - 1)] for at in range(NUM_SPREAD)}) if rest else []
    return [*ranges, last, *(StepRange(f"step {step}", (step,)) for step in spread)]


def step_seconds(records: TimelineRecords) -> dict[int, float]:
    """Return the seconds from the first start to the last end of each step, over all ranks."""
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    for span in records.spans:
        starts[span.step] = min(span.start, starts.get(span.step, span.start))
        ends[span.step] = max(span.end, ends.get(span.step, span.end))
    return {step: ends[step] - starts[step] for step in starts}


def stage_order(records: TimelineRecords) -> list[str]:
    """Return the names of the stages in order of appearance, which is also the order of their colors."""
    return list(dict.fromkeys(span.stage for span in records.spans))


def gantt(records: TimelineRecords) -> Parts:
    """Return every rank's stages, one view per range of steps."""
    stages = stage_order(records)
    views = [(steps.title, _gantt_svg(_spans_of(records, steps), stages)) for steps in step_ranges(records)]
    shown = [(title, svg) for title, svg in views if svg]
    return [Choices("gantt", list(enumerate(stages)), shown)] if shown else []


def memory_by_owner(records: TimelineRecords) -> Parts:
    """Return bytes by owner at the stage ends of the rank with the highest peak, and each owner's highest peaks."""
    if not records.snapshots:
        return []
    rank = max(records.snapshots, key=lambda snapshot: max(snapshot.held.peak, snapshot.held.device_bytes)).rank
    mine = [snapshot for snapshot in records.snapshots if snapshot.rank == rank]
    places = [place for one in mine for place in (one.held.device, one.held.host, one.held.peaks)]
    owners = list(dict.fromkeys(owner for place in places for owner, size in place.items() if size))
    views = []
    for steps in step_ranges(records):
        chosen = [snapshot for snapshot in mine if snapshot.step in steps.steps]
        if chosen:
            views.append((steps.title, _memory_figures(chosen, owners)))
    note = f"Rank {rank}, the one with the highest peak on its device."
    return [Choices("memory", list(enumerate(owners)), views, note), *_peaks(mine, owners)] if views else []


def _peaks(snapshots: Sequence[MemorySnapshot], owners: Sequence[str]) -> Parts:
    """Return the highest peak since the previous boundary over all steps, one row per stage that ended."""
    lengths = Counter(snapshot.step for snapshot in snapshots)
    # In the order of the step with most stages; an evaluation's step, for example, has few.
    known = [one.held for one in sorted(snapshots, key=lambda one: -lengths[one.step]) if one.held.peaks]
    used = [owner for owner in owners if any(one.peaks.get(owner) for one in known)]
    rows = []
    for stage in dict.fromkeys(one.stage for one in known):
        ended = [one for one in known if one.stage == stage]
        peaks = [max(one.peaks.get(owner, 0) for one in ended) for owner in used]
        rows.append([stage, *(bytes_text(peak) if peak else "" for peak in (*peaks, max(one.peak for one in ended)))])
    title = "Peaks on the device since the boundary before, the highest of all steps"
    return [Table(("until the end of", *used, "all together"), rows, title)] if used else []


def _range_text(steps: Sequence[int]) -> str:
    return f"{steps[0]}–{steps[-1]}"


def _spans_of(records: TimelineRecords, steps: StepRange) -> list[Span]:
    chosen = [span for span in records.spans if span.step in steps.steps]
    ranks = _shown_ranks({span.rank for span in chosen})
    spans = [span for span in chosen if span.rank in ranks]
    # If there are too many, the shortest can't be seen anyway.
    return sorted(sorted(spans, key=lambda span: -span.seconds)[:MAX_SPANS], key=lambda span: span.start)


def _shown_ranks(ranks: set[int]) -> set[int]:
    """Return all ranks, or evenly spread ones where there are too many rows to read."""
    ordered = sorted(ranks)
    if len(ordered) <= MAX_RANKS:
        return ranks
    return {ordered[at * (len(ordered) - 1) // (MAX_RANKS - 1)] for at in range(MAX_RANKS)}


def _gantt_svg(spans: Sequence[Span], stages: Sequence[str]) -> Markup:
    if not spans:
        return Markup()
    ranks = sorted({span.rank for span in spans})
    origin = min(span.start for span in spans)
    whole = max(max(span.end for span in spans) - origin, 1e-6)
    scale = (WIDTH - LEFT - RIGHT) / whole
    height = len(ranks) * ROW_HEIGHT + AXIS_HEIGHT
    parts = [_time_axis(whole, scale, height)]
    for row, rank in enumerate(ranks):
        parts.append(f'<text class="ty" x="{LEFT - 6}" y="{(row + 0.5) * ROW_HEIGHT:.1f}">rank {rank}</text>')
    row_of = {rank: row for row, rank in enumerate(ranks)}
    color_of = {stage: color_class(index) for index, stage in enumerate(stages)}
    for span in sorted(spans, key=lambda span: span.background):
        x, width = LEFT + (span.start - origin) * scale, max(0.5, span.seconds * scale)
        broken = " broken" if span.error else ""
        # Background spans are a strip at the bottom of the stages.
        bar_height = BACKGROUND_HEIGHT if span.background else ROW_HEIGHT - 4
        y = (row_of[span.rank] + 1) * ROW_HEIGHT - 2 - bar_height
        parts.append(
            f'<rect class="bar {color_of[span.stage]}{broken}" x="{x:.1f}" y="{y}" '
            f'width="{width:.1f}" height="{bar_height}">{_span_title(span)}</rect>'
        )
    return _svg(height, "stages of each rank over time", parts)


def _span_title(span: Span) -> str:
    failed = f", ended by {span.error}" if span.error else ""
    moved = "".join(
        f"; {link_text(one.link)}: {bytes_text(one.num_bytes)} at {value_text(one.gb_per_second)} GB/s"
        for one in span.moved
    )
    text = f"{span.stage}, step {span.step}, rank {span.rank}: {span.seconds:.3g} s{moved}{failed}"
    return f"<title>{escape(text)}</title>"


def _time_axis(whole: float, scale: float, height: int) -> str:
    bottom = height - AXIS_HEIGHT
    parts = []
    for second in ticks(0.0, whole, 8):
        x = f"{LEFT + second * scale:.1f}"
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="{bottom}"/>')
        parts.append(f'<text class="tx" x="{x}" y="{bottom + 15}">{second:g} s</text>')
    return "".join(parts)


def _memory_figures(snapshots: Sequence[MemorySnapshot], owners: Sequence[str]) -> Markup:
    device = [snapshot.held.device for snapshot in snapshots]
    host = [snapshot.held.host for snapshot in snapshots]
    labels = [f"{snapshot.step} {snapshot.held.stage}" for snapshot in snapshots]
    return Markup().join(
        Markup("<h3>{}</h3>").format(place) + _memory_svg(list(zip(labels, held, strict=True)), owners)
        for place, held in (("On the device", device), ("On the host", host))
        if any(sum(bytes_of.values()) for bytes_of in held)
    )


def _memory_svg(bars: Sequence[tuple[str, Mapping[str, int]]], owners: Sequence[str]) -> Markup:
    peak = max(max(sum(held.values()) for _, held in bars), 1)
    unit_scale, unit = byte_unit(peak)
    scale = (MEMORY_HEIGHT - 10) / peak
    pitch = min(60.0, (WIDTH - LEFT - RIGHT) / len(bars))
    parts: list[str] = []
    for value in ticks(0.0, peak / unit_scale, 4):
        y = f"{MEMORY_HEIGHT - value * unit_scale * scale:.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="ty" x="{LEFT - 6}" y="{y}">{value:g} {unit}</text>')
    for index, (label, held) in enumerate(bars):
        x = LEFT + index * pitch
        parts.append(_stacked_bar(held, owners, x=x + 0.1 * pitch, width=0.8 * pitch, scale=scale))
        at = f"{x + pitch / 2:.1f} {MEMORY_HEIGHT + 8}"
        parts.append(f'<text class="slant" transform="translate({at}) rotate(-40)">{escape(label)}</text>')
    return _svg(MEMORY_HEIGHT + LABEL_HEIGHT, "memory by owner", parts)


def _stacked_bar(held: Mapping[str, int], owners: Sequence[str], *, x: float, width: float, scale: float) -> str:
    parts, top = [], float(MEMORY_HEIGHT)
    for index, owner in enumerate(owners):
        height = held.get(owner, 0) * scale
        if height <= 0:
            continue
        top -= height
        title = f"<title>{escape(f'{owner}: {bytes_text(held[owner])}')}</title>"
        box = f'x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"'
        parts.append(f'<rect class="bar {color_class(index)}" {box}>{title}</rect>')
    return "".join(parts)


def _svg(height: int, label: str, parts: Sequence[str]) -> Markup:
    box = f'viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}"'
    return Markup(f'<div class="scroll"><svg class="wide" {box}>{"".join(parts)}</svg></div>')  # noqa: S704
