"""The report of a run: one offline HTML file, made from whatever files the run left."""

from __future__ import annotations

import argparse
import contextlib
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from spmdrl.observability.jsonl import write_atomic
from spmdrl.observability.report.charts import Chart
from spmdrl.observability.report.curves import (
    detail_charts,
    learning_charts,
    machinery_charts,
    speed_charts,
    traffic_charts,
)
from spmdrl.observability.report.gantt import gantt, memory_by_owner
from spmdrl.observability.report.page import ChartGrid, Header, Parts, Section, page_html
from spmdrl.observability.report.plan_section import planned_beside_measured
from spmdrl.observability.report.run_files import RunData, read_run
from spmdrl.observability.report.sample_section import sample_viewer
from spmdrl.observability.report.sections import (
    COMPARED,
    compared,
    comparison,
    configuration,
    header,
    health,
)
from spmdrl.observability.report.traffic_section import moved_by_link, sample_flow
from spmdrl.observability.timeline import write_perfetto
from spmdrl.runtime.screen import output_file, show, waiting

REPORT_FILE = "report.html"
COMPARISON_FILE = "report_compare.html"


def write_report(
    run_dir: Path, *, others: Sequence[Path] = (), out: Path | None = None, more: Sequence[Section] = ()
) -> Path:
    """Write the report of a run; also works while it runs and after a crash. The sections of `more` come first.

    With `others` it compares their curves, in a file beside the run's own report. Raises FileNotFoundError if a run's
    folder is missing.
    """
    runs = [read_run(folder) for folder in (run_dir, *others)]
    path = Path(out) if out is not None else Path(run_dir) / (COMPARISON_FILE if others else REPORT_FILE)
    write_atomic(path, page_html(header(runs[0]), _sections(runs, more)))
    return path


def main(argv: Sequence[str]) -> int:
    """Return the verb `report`."""
    arguments = _parser().parse_args(argv)
    if arguments.serve is not None:
        return _serve([arguments.run_dir, *arguments.other_run_dirs], arguments.serve)
    try:
        path = write_report(arguments.run_dir, others=arguments.other_run_dirs, out=arguments.output)
    except FileNotFoundError as error:
        show(f"spmdrl report: {error}", stream=sys.stderr)
        return 2
    if arguments.other_run_dirs:
        runs = [read_run(folder) for folder in (arguments.run_dir, *arguments.other_run_dirs)]
        cells = [COMPARED, *compared(runs)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        show("\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells))
    show(f"report: {path}")
    if arguments.perfetto is not None:
        write_perfetto(arguments.run_dir / "timeline", arguments.perfetto)
        show(f"trace: {arguments.perfetto} (open it in ui.perfetto.dev)")
    return 0


def _serve(folders: Sequence[Path], port: int) -> int:
    """Serve the pages of all runs in some folders until Ctrl-C or SIGTERM."""
    if missing := [str(folder) for folder in folders if not folder.is_dir()]:
        show(
            f"spmdrl report: {missing[0]} is no folder; give run folders, or folders that hold some", stream=sys.stderr
        )
        return 2
    # Jobs write reports too, and need no HTTP server.
    from spmdrl.observability.report.server import Pages, ReportServer

    # What its pages are forked from has a folder, which only an orderly end removes.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with waiting("reading the runs"):
        pages = Pages(folders, _contents)
    try:
        server = ReportServer(pages, port)
    except OSError as error:
        show(f"spmdrl report: port {port} can't be opened ({error}); leave it out for a free one", stream=sys.stderr)
        return 2
    with server, contextlib.suppress(KeyboardInterrupt):
        port = server.server_port
        show(f"runs: {server.url} (Ctrl-C ends this)")
        show(f"from another machine: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}, then the same address")
        server.serve_forever()
    return 0


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 <= int(text) <= 65_535:
        raise argparse.ArgumentTypeError(f"{text} is no port; write folders before --serve, and a port of 0 to 65535")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    what = "Write one offline HTML file about a run, or serve the pages of many."
    parser = argparse.ArgumentParser(prog="spmdrl report", description=what)
    parser.add_argument(
        "run_dir", type=Path, help="the run's folder, into which the report goes; --serve: or one of runs"
    )
    parser.add_argument("other_run_dirs", type=Path, nargs="*", metavar="OTHER_RUN_DIR", help="runs to compare with")
    parser.add_argument(
        "-o", "--output", type=output_file, metavar="FILE",
        help=f"where to write it instead of RUN_DIR/{REPORT_FILE}, or RUN_DIR/{COMPARISON_FILE} of several runs",
    )  # fmt: skip
    parser.add_argument(
        "--serve", type=_port, nargs="?", const=0, metavar="PORT",
        help="show these runs, or all runs in these folders, in a browser of this machine while they go on",
    )  # fmt: skip
    parser.add_argument(
        "--perfetto", type=output_file, metavar="FILE", help="also write the timeline as a Perfetto trace"
    )
    return parser


def _contents(run_dir: Path) -> tuple[Header, Iterator[Section]]:
    """Return what the page of one run shows."""
    run = read_run(run_dir)
    return header(run), _sections([run], [])


def _sections(runs: Sequence[RunData], more: Sequence[Section]) -> Iterator[Section]:
    """Yield the sections one by one: the points of all charts together take more memory than the run's records."""
    first = runs[0]
    yield from more
    yield Section("runs", "Runs", comparison(runs))
    yield Section("curves", "Curves", _grid(learning_charts(runs), first))
    yield Section("detail", "Details", _grid(detail_charts(runs), first))
    yield Section("time", "Time", [*gantt(first.timeline), *_grid(speed_charts(runs))])
    yield Section("memory", "Memory by owner", memory_by_owner(first.timeline))
    yield Section("plan", "Planned and measured", planned_beside_measured(first))
    yield Section("samples", "Samples", sample_viewer(first.run_dir))
    moved = [*_grid(traffic_charts(runs)), *sample_flow(first), *moved_by_link(first.timeline)]
    yield Section("data", "Bytes moved", moved)
    yield Section("health", "Health", health(first))
    yield Section("more", "All other metrics", _grid(machinery_charts(runs)), is_folded=True)
    yield Section("config", "Configuration", configuration(first))


def _grid(charts: Sequence[Chart], marked: RunData | None = None) -> Parts:
    """Return the charts that show something, and the titles of those that are 0 throughout.

    Steps after which the settings of `marked` changed are marked.
    """
    marks = sorted({step for step, _ in marked.changes}) if marked else []
    charts = [replace(chart, marks=marks) for chart in charts]
    zeros = [chart for chart in charts if all(y == 0 for one in chart.series for _, y in one.points)]
    shown = [chart for chart in charts if chart not in zeros]
    return [ChartGrid(shown, [chart.title for chart in zeros])] if charts else []
