"""The page of a run while it is served: parts are made anew when the run's files have changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from spmdrl.observability.alert_log import ALERTS_FILE
from spmdrl.observability.log import CHECKPOINTS_FILE, METRICS_FILE, SAMPLES_FILE
from spmdrl.observability.report.page import (
    Header,
    Samples,
    Section,
    data_of,
    macro_html,
    page_html,
)
from spmdrl.observability.report.run_index import signature_of
from spmdrl.observability.summary import SUMMARY_FILE
from spmdrl.runtime.supervision.holder import is_held

_READ = (METRICS_FILE, SAMPLES_FILE, CHECKPOINTS_FILE, SUMMARY_FILE, ALERTS_FILE)
_IDLE_TIMES = 3.0
"""least time between two makings, in times that the last one took"""

Contents = Callable[[Path], tuple[Header, Sequence[Section]]]


class LiveRun:
    """One run's page, of which only the newest version is kept."""

    def __init__(self, folder: Path, contents: Contents):
        """`contents` reads a run's folder and returns what its page shows."""
        self._folder, self._contents = folder, contents
        self._signature: object = None
        self._wait_until = 0.0
        self._version = 0
        self._top = Header("", "", "", {})
        self._header, self._header_version = "", 0
        self._sections: Sequence[Section] = ()
        self._bodies: dict[str, tuple[str, int]] = {}
        """each section's text, and the version in which it changed last"""

    def page(self) -> str:
        """Return the whole page."""
        self._refresh()
        return page_html(self._top, self._sections, live=f"parts.json?known={self._version}")

    def parts(self, known: int) -> dict[str, Any]:
        """Return what has changed since a version; its charts' data come with a section, samples by themselves."""
        self._refresh()
        changed = [one for one in self._sections if self._bodies[one.anchor][1] > known]
        news: dict[str, Any] = {"version": self._version, "charts": data_of(changed), "sections": {}}
        if self._header_version > known:
            news["header"] = self._header
        for section in changed:
            news["sections"][section.anchor] = self._bodies[section.anchor][0]
            if section.parts and isinstance(viewer := section.parts[0], Samples):
                empty = section._replace(parts=[replace(viewer, samples=[])])
                news["sections"][section.anchor] = macro_html("body", empty)
                news |= {"samples": viewer.samples, "note": viewer.note}
        return news

    def _refresh(self) -> None:
        """Make the parts anew if a file has changed, but use at most a quarter of the time for it."""
        signature = [signature_of(self._folder / name) for name in _READ] + [is_held(self._folder)]
        started = time.monotonic()
        if signature == self._signature or started < self._wait_until:
            return
        self._signature, self._version = signature, self._version + 1
        self._top, self._sections = self._contents(self._folder)
        if (text := macro_html("header", self._top)) != self._header:
            self._header, self._header_version = text, self._version
        for section in self._sections:
            body, before = macro_html("body", section), self._bodies.get(section.anchor)
            if before is None or before[0] != body:
                self._bodies[section.anchor] = body, self._version
        self._wait_until = time.monotonic() + _IDLE_TIMES * (time.monotonic() - started)
