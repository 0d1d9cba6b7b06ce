"""The page of a run while it is served: parts are made anew when the run's files have changed."""

from __future__ import annotations

import gc
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path

from spmdrl.observability.alert_log import ALERTS_FILE
from spmdrl.observability.log import CHECKPOINTS_FILE, METRICS_FILE, SAMPLES_FILE
from spmdrl.observability.report.page import (
    Drawn,
    Header,
    Section,
    drawn,
    drawn_page,
    joined_json,
    macro_html,
    script_json,
)
from spmdrl.observability.report.run_index import signature_of
from spmdrl.observability.summary import SUMMARY_FILE
from spmdrl.runtime.supervision.holder import is_held

_READ = (METRICS_FILE, SAMPLES_FILE, CHECKPOINTS_FILE, SUMMARY_FILE, ALERTS_FILE)
_IDLE_TIMES = 3.0
"""least time between two makings, in times that the last one took"""

Contents = Callable[[Path], tuple[Header, Iterable[Section]]]


class LiveRun:
    """One run's page, of which only the newest version is kept."""

    def __init__(self, folder: Path, contents: Contents):
        """`contents`, a module's function, reads a run's folder and returns what its page shows."""
        self._folder, self._contents = folder, contents
        self._signature: object = None
        self._wait_until = 0.0
        self._version = 0
        self._header = Header("", "", "", {})
        self._header_version = 0
        self._sections: dict[str, tuple[Drawn, int]] = {}
        """sections by anchor, and the version in which each changed last"""

    def page(self) -> str:
        """Return the whole page."""
        self._refresh()
        sections = [section for section, _ in self._sections.values()]
        return drawn_page(self._header, sections, live=f"parts.json?known={self._version}")

    def parts(self, known: int) -> str:
        """Return what has changed since a version as JSON; charts' data come with a section, samples by themselves."""
        self._refresh()
        changed = {name: section for name, (section, version) in self._sections.items() if version > known}
        news = {"version": str(self._version)}
        if self._header_version > known:
            news["header"] = script_json(macro_html("header", self._header))
        for section in changed.values():
            if section.samples:
                news |= {"samples": section.samples, "note": script_json(section.note)}
        news["sections"] = joined_json({name: script_json(section.body) for name, section in changed.items()})
        news["charts"] = joined_json({name: section.charts for name, section in changed.items() if section.charts})
        return joined_json(news)

    def _refresh(self) -> None:
        """Make the parts anew if a file has changed, but use at most a quarter of the time for it."""
        signature = [signature_of(self._folder / name) for name in _READ] + [is_held(self._folder)]
        started = time.monotonic()
        if signature == self._signature or started < self._wait_until:
            return
        header, sections = self._drawn()
        self._signature, self._version = signature, self._version + 1
        if header != self._header:
            self._header, self._header_version = header, self._version
        for section in sections:
            before = self._sections.get(section.section.anchor)
            if before is None or before[0] != section:
                self._sections[section.section.anchor] = section, self._version
        self._wait_until = time.monotonic() + _IDLE_TIMES * (time.monotonic() - started)

    def _drawn(self) -> tuple[Header, list[Drawn]]:
        """Return what the page shows, drawn by a child process: the records of all steps end with it.

        Raises FileNotFoundError if the run is gone.
        """
        # Not forked from here: a copy of one thread of several may crash or wait for another one.
        context = multiprocessing.get_context("forkserver")
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_send_drawn, args=(self._contents, self._folder, sender), daemon=True)
        child.start()
        sender.close()
        with receiver:
            try:
                found = receiver.recv()
            except EOFError:
                found = None
            child.join()
        if found is None:
            raise RuntimeError(f"the page of {self._folder} isn't drawn: its process ended with {child.exitcode}")
        if isinstance(found, Exception):
            raise found
        return found


def _send_drawn(contents: Contents, folder: Path, sender: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Of a hundred thousand records the collector finds none to free, in a quarter of the time.
    gc.disable()
    try:
        header, sections = contents(folder)
        sender.send((header, list(map(drawn, sections))))
    except Exception as error:
        sender.send(error)
