"""The page as data: sections of parts, each drawn by the macro of its name in assets/parts.html."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from spmdrl.observability.report.charts import Chart, chart_data, chart_svg, color_class

ASSETS = Path(__file__).with_name("assets")
SCRIPTS = ("page.js", "charts.js", "samples.js", "report.js")
INDEX_SCRIPTS = ("page.js", "runs.js")


@dataclass(frozen=True)
class Table:
    macro: ClassVar[str] = "table"
    head: Sequence[str]
    rows: Sequence[Sequence[object]]
    title: str = ""
    note: str = ""


@dataclass(frozen=True)
class ChartGrid:
    macro: ClassVar[str] = "chart_grid"
    charts: Sequence[Chart]
    zeros: Sequence[str]
    """titles of charts left out because they are 0 throughout"""


@dataclass(frozen=True)
class Choices:
    """Drawings of which one is shown at a time, selected by title."""

    macro: ClassVar[str] = "choices"
    name: str
    legend: Sequence[tuple[int, str]]
    views: Sequence[tuple[str, Markup]]
    note: str = ""


@dataclass(frozen=True)
class Samples:
    """Samples as the page's script reads them."""

    macro: ClassVar[str] = "samples"
    samples: Sequence[Mapping[str, Any]]
    note: str = ""


@dataclass(frozen=True)
class ConfigText:
    """Each line's setting, and the origin of its value."""

    macro: ClassVar[str] = "config_text"
    lines: Sequence[tuple[str, str]]


Parts = list[Table | ChartGrid | Choices | Samples | ConfigText]


class Section(NamedTuple):
    """A section of the page, left out if it has no parts."""

    anchor: str
    title: str
    parts: Parts
    is_folded: bool = False


class Header(NamedTuple):
    """The run's name and verdict, its alerts, and facts about it; empty ones are left out."""

    name: str
    verdict: str
    tone: str
    facts: Mapping[str, str]
    alerts: Sequence[Mapping[str, Any]] = ()
    """the last alert of each symptom"""


class Drawn(NamedTuple):
    """A section as HTML, with the data that the page's script needs as JSON, empty if it has none."""

    section: Section
    """without its parts"""
    body: Markup
    charts: Markup
    """data of each chart, in the order of the page"""
    samples: Markup
    note: str
    """about the samples"""


def drawn(section: Section) -> Drawn:
    """Draw a section as texts, which take a tenth of the memory of the numbers in them."""
    charts = [chart_data(chart) for part in section.parts if isinstance(part, ChartGrid) for chart in part.charts]
    viewers = [part for part in section.parts if isinstance(part, Samples)]
    samples, note = (script_json(viewers[0].samples), viewers[0].note) if viewers else (Markup(), "")
    body = Markup(macro_html("body", section))  # noqa: S704
    return Drawn(section._replace(parts=[]), body, script_json(charts) if charts else Markup(), samples, note)


def script_json(value: Any) -> Markup:
    """Return JSON that may stand in a page's script element."""
    return htmlsafe_json_dumps(value, separators=(",", ":"), allow_nan=False)


def joined_json(values: Mapping[str, str]) -> Markup:
    """Return the JSON object of values that are JSON already."""
    return Markup("{" + ",".join(f"{script_json(name)}:{value}" for name, value in values.items()) + "}")  # noqa: S704


def page_html(header: Header, sections: Iterable[Section]) -> str:
    """Return the whole page; scripts, styles and data are part of it, and all that a run wrote is escaped."""
    return drawn_page(header, [drawn(section) for section in sections if section.parts])


def drawn_page(header: Header, sections: Sequence[Drawn], *, live: str = "") -> str:
    """Return the page of these sections; with `live`, a path beside its own, it fetches from there what has changed."""
    data = joined_json({one.section.anchor: one.charts for one in sections if one.charts})
    return _whole_page("page.html", SCRIPTS, header=header, sections=sections, chart_data=data, live=live)


def index_html(title: str) -> str:
    """Return the page of all runs, which fetches their rows."""
    return _whole_page("index.html", INDEX_SCRIPTS, title=title, live="runs.json")


def macro_html(name: str, value: Section | Header) -> str:
    """Return a part of the page: the `header`, or the `body` below a section's title."""
    return str(getattr(_templates().get_template("parts.html").module, name)(value))


def _whole_page(template: str, scripts: Sequence[str], *, live: str, **values: object) -> str:
    script = "".join(map(_asset, scripts))
    return _templates().get_template(template).render(
        live=live,
        policy=_policy(script, fetches=bool(live)),
        script=Markup(script),  # noqa: S704
        style=Markup(_asset("report.css")),  # noqa: S704
        **values,
    )  # fmt: skip


def value_text(value: float) -> str:
    """Return a value in four significant digits."""
    return f"{value:.4g}" if math.isfinite(value) else str(value)


@cache
def _templates() -> Environment:
    loader = FileSystemLoader(ASSETS)
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found.filters |= {"chart_svg": chart_svg, "color_class": color_class}
    return found


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _policy(script: str, *, fetches: bool) -> str:
    """Return a browser policy under which only the page's own script runs, and fetches from its server at most."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = ["default-src 'none'", "style-src 'unsafe-inline'", f"script-src 'sha256-{digest}'", "base-uri 'none'"]
    return "; ".join(rules + ["connect-src 'self'"] * fetches)
