"""The report of a run: one HTML file that needs no network, made from whatever files the run left behind."""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import sys
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from spmdrl.observability.holder import is_held
from spmdrl.observability.logs.jsonl import write_atomic
from spmdrl.observability.report.charts import Chart, chart_data, chart_figure
from spmdrl.observability.report.curves import (
    learning_charts,
    other_charts,
    speed_charts,
    traffic_charts,
    without_zeros,
)
from spmdrl.observability.report.flow_section import sample_flow
from spmdrl.observability.report.gantt import gantt, memory_by_owner
from spmdrl.observability.report.html import contents, embedded_json, escape, section
from spmdrl.observability.report.resharding_section import moved_by_link
from spmdrl.observability.report.run_files import RunData, read_run
from spmdrl.observability.report.samples_section import sample_section
from spmdrl.observability.report.sections import comparison, configuration, header, health
from spmdrl.observability.terminal.screen import show
from spmdrl.observability.timeline.timeline import write_perfetto

REPORT_FILE = "report.html"
SCRIPTS = ("page.js", "charts.js", "report.js")


def write_report(run_dir: Path, *, others: Sequence[Path] = (), out: Path | None = None) -> Path:
    """Write the report of a run, its curves laid over those of `others`; also works while it runs and after a crash.

    Raises FileNotFoundError where a run's folder isn't there.
    """
    runs = [read_run(folder) for folder in (run_dir, *others)]
    path = Path(out) if out is not None else Path(run_dir) / REPORT_FILE
    write_atomic(path, _page(runs))
    return path


def main(argv: Sequence[str]) -> int:
    """The verb `report`."""
    arguments = _parser().parse_args(argv)
    try:
        path = write_report(arguments.run_dir, others=arguments.other_run_dirs, out=arguments.output)
        if arguments.watch is not None:
            show(f"report: {path}, written anew each {arguments.watch:g} s while the run goes on; Ctrl-C ends this")
            _watch(arguments)
    except FileNotFoundError as error:
        show(f"spmdrl report: {error}", stream=sys.stderr)
        return 2
    show(f"report: {path}")
    if arguments.perfetto is not None:
        write_perfetto(arguments.run_dir / "timeline", arguments.perfetto)
        show(f"trace: {arguments.perfetto} (open it in ui.perfetto.dev)")
    return 0


def _watch(arguments: argparse.Namespace) -> None:
    """Write the report again and again while a job holds the run's folder, and once more after it."""
    is_running = True
    with contextlib.suppress(KeyboardInterrupt):
        while is_running:
            time.sleep(arguments.watch)
            is_running = is_held(arguments.run_dir)
            write_report(arguments.run_dir, others=arguments.other_run_dirs, out=arguments.output)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text} is no time to wait; give 0.1 to 86400 seconds")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="spmdrl report", description="Write one offline HTML file about a run.")
    parser.add_argument("run_dir", type=Path, help="the run's folder; the report is written into it")
    parser.add_argument("other_run_dirs", type=Path, nargs="*", metavar="OTHER_RUN_DIR", help="runs to compare with")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write it instead of RUN_DIR/report.html")
    parser.add_argument(
        "--watch", type=_seconds, nargs="?", const=10.0, metavar="SECONDS",
        help="write it again each so many seconds (10) while the run goes on; the page's `live` box reloads it",
    )  # fmt: skip
    parser.add_argument("--perfetto", type=Path, metavar="FILE", help="also write the timeline as a Perfetto trace")
    return parser


def _page(runs: Sequence[RunData]) -> str:
    first = runs[0]
    charts: list[Chart] = []
    sections = [
        comparison(runs),
        section("curves", "Curves", _chart_grid(learning_charts(runs), charts)),
        section("time", "Time", gantt(first.timeline), _chart_grid(speed_charts(runs), charts)),
        section("memory", "Memory by owner", memory_by_owner(first.timeline)),
        sample_section(first.samples),
        section(
            "data",
            "Bytes moved",
            _chart_grid(traffic_charts(runs), charts),
            sample_flow(first),
            moved_by_link(first.timeline),
        ),
        health(first),
        section("more", "All other metrics", _folded(_chart_grid(other_charts(runs), charts))),
        configuration(first),
    ]
    data = embedded_json([chart_data(chart) for chart in charts])
    script = "".join(map(_asset, SCRIPTS))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{escape(_policy(script))}">
<title>{escape(first.name)} - spmdrl report</title>
<style>{_asset("report.css")}</style>
</head>
<body>
{header(first)}
{contents(sections)}
<main>
{"".join(sections)}
</main>
<div id="hover" hidden></div>
<script type="application/json" id="chart-data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def _chart_grid(new: Sequence[Chart], charts: list[Chart]) -> str:
    """Figures of the `new` charts, which are appended to the page's `charts`."""
    shown, zeros = without_zeros(new)
    figures = [chart_figure(chart, len(charts) + index) for index, chart in enumerate(shown)]
    charts.extend(shown)
    note = f'<p class="note">0 throughout: {escape(", ".join(zeros))}.</p>' if zeros else ""
    return (f'<div class="grid-of-charts">{"".join(figures)}</div>' if figures else "") + note


def _folded(content: str) -> str:
    return f"<details><summary>Show</summary>{content}</details>" if content else ""


def _policy(script: str) -> str:
    """A browser policy under which nothing is fetched and no script but the page's own runs."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = ("default-src 'none'", "style-src 'unsafe-inline'", f"script-src 'sha256-{digest}'", "base-uri 'none'")
    return "; ".join(rules)


def _asset(name: str) -> str:
    return resources.files("spmdrl.observability.report").joinpath("assets").joinpath(name).read_text(encoding="utf-8")
