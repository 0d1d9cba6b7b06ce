"""Server of reports while runs go on: pages and their data, on loopback, at an address with a token."""

from __future__ import annotations

import gc
import gzip
import hmac
import multiprocessing
import secrets
import signal
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from socketserver import TCPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from spmdrl.observability.alert_log import ALERTS_FILE
from spmdrl.observability.jsonl import to_json
from spmdrl.observability.log import CHECKPOINTS_FILE, METRICS_FILE, SAMPLES_FILE
from spmdrl.observability.report.page import (
    Drawn,
    Header,
    Section,
    drawn,
    drawn_page,
    index_html,
    joined_json,
    macro_html,
    script_json,
)
from spmdrl.observability.report.run_index import RunIndex, signature_of
from spmdrl.observability.summary import SUMMARY_FILE
from spmdrl.runtime.supervision.holder import is_held

HOST = "127.0.0.1"
_NAMES = ("127.0.0.1", "localhost")
"""names by which a browser may ask: another one is a page that points its own name here (DNS rebinding)"""
_MOST_THREADS = 32
_MOST_PAGES = 4
_READ = (METRICS_FILE, SAMPLES_FILE, CHECKPOINTS_FILE, SUMMARY_FILE, ALERTS_FILE)
_IDLE_TIMES = 3.0
"""least time between two makings, in times that the last one took"""
_HTML, _JSON = "text/html; charset=utf-8", "application/json"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


Contents = Callable[[Path], tuple[Header, Iterable[Section]]]


class Answer(NamedTuple):
    status: HTTPStatus
    kind: str
    body: bytes


class Pages:
    """The pages of some folders' runs; a path is looked up among the runs and never opened."""

    def __init__(self, folders: Sequence[Path], contents: Contents):
        self.token = secrets.token_urlsafe(24)
        self._index_page = index_html(", ".join(folder.resolve().name for folder in folders)).encode()
        self._index = RunIndex(folders)
        self._contents = contents
        # Pages are forked from a process that imports, before the first is asked for, what each fork would.
        forkserver.set_forkserver_preload(["spmdrl.__main__", contents.__module__])
        forkserver.ensure_running()
        # The runs are read meanwhile: the first request for the index would take a second longer.
        self._index.rows()
        self._live: OrderedDict[str, LiveRun] = OrderedDict()
        # Requests are served by threads; readers keep offsets.
        self._locks = threading.Lock(), threading.Lock()

    def answer(self, target: str, host: str) -> Answer:
        """Return the answer to a GET of `target` that was sent to `host`."""
        path = urlsplit(target)
        parts = [unquote(part) for part in path.path.split("/")]
        token = parts[1] if len(parts) > 1 else ""
        if host.partition(":")[0] not in _NAMES or not hmac.compare_digest(token.encode(), self.token.encode()):
            return Answer(HTTPStatus.FORBIDDEN, "text/plain", b"the address that spmdrl report printed has a token\n")
        match parts[2:]:
            case [""]:
                return Answer(HTTPStatus.OK, _HTML, self._index_page)
            case ["runs.json"]:
                with self._locks[0]:
                    return Answer(HTTPStatus.OK, _JSON, to_json(self._index.rows()).encode())
            case ["run", key, ("" | "parts.json") as name]:
                return self._of_run(key, name, path.query)
        return Answer(HTTPStatus.NOT_FOUND, "text/plain", b"no such page\n")

    def _of_run(self, key: str, name: str, query: str) -> Answer:
        with self._locks[1]:
            run = self._live_run(key)
            try:
                if run is not None and name == "":
                    return Answer(HTTPStatus.OK, _HTML, run.page().encode())
                if run is not None:
                    known = parse_qs(query).get("known", ["0"])[0]
                    parts = run.parts(int(known) if known.isdecimal() and len(known) < 10 else 0)
                    return Answer(HTTPStatus.OK, _JSON, parts.encode())
            except FileNotFoundError:
                del self._live[key]
            return Answer(HTTPStatus.NOT_FOUND, "text/plain", b"no such run\n")

    def _live_run(self, key: str) -> LiveRun | None:
        """Return the page of a run, of which those that were asked for last are kept; None if there is no such run."""
        if key not in self._live:
            with self._locks[0]:
                if self._index.folder_of(key) is None:
                    self._index.rows()
                folder = self._index.folder_of(key)
            if folder is None:
                return None
            self._live[key] = LiveRun(folder, self._contents)
        self._live.move_to_end(key)
        while len(self._live) > _MOST_PAGES:
            self._live.popitem(last=False)
        return self._live[key]


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


class ReportServer(ThreadingHTTPServer):
    """Server of pages on loopback, at a port or, with 0, at a free one."""

    daemon_threads = True

    def __init__(self, pages: Pages, port: int):
        self.pages = pages
        super().__init__((HOST, port), _Handler)

    def server_bind(self) -> None:
        """Bind without asking for this host's name, which may take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.socket.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.pages.token}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection by a thread; more than a few are a stranger's, and closed."""
        if threading.active_count() > _MOST_THREADS:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Show what is wrong with an answer, but not that a browser has left."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    timeout = 10
    server_version = "spmdrl"
    sys_version = ""

    def do_GET(self) -> None:
        answer = self.server.pages.answer(self.path, self.headers.get("Host", ""))
        body = answer.body
        self.send_response(answer.status)
        if "gzip" in self.headers.get("Accept-Encoding", "") and len(body) > 10_000:
            body = gzip.compress(body, 1)
            self.send_header("Content-Encoding", "gzip")
        for name, value in {**_HEADERS, "Content-Type": answer.kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing: the screen belongs to the address."""
