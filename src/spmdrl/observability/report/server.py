"""Server of reports while runs go on: pages and their data, on loopback, at an address with a token."""

from __future__ import annotations

import gzip
import hmac
import secrets
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import forkserver
from pathlib import Path
from socketserver import TCPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from spmdrl.observability.jsonl import to_json
from spmdrl.observability.report.live_run import Contents, LiveRun
from spmdrl.observability.report.page import index_html
from spmdrl.observability.report.run_index import RunIndex

HOST = "127.0.0.1"
_NAMES = ("127.0.0.1", "localhost")
"""names by which a browser may ask: another one is a page that points its own name here (DNS rebinding)"""
_MOST_THREADS = 32
_MOST_PAGES = 4
_HTML, _JSON = "text/html; charset=utf-8", "application/json"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


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
