"""Data sets of the hub: the files of a split, from the cache of huggingface_hub or from a server with its interface."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from spmdrl.dataflow.data.data_rows import read_rows
from spmdrl.nouns.settings.data_config import DataConfig


def row(prompt: str) -> bytes:
    return json.dumps({"prompt": prompt, "answer": "1"}).encode() + b"\n"


SPLITS = {
    "README.md": b"# no header\n",
    "data/train-00000-of-00002.jsonl": row("a") + row("b"),
    "data/train-00001-of-00002.jsonl": row("c"),
    "data/test-00000-of-00001.jsonl": row("held out"),
}


SHA = sha1(b"commit").hexdigest()


def cached(folder: Path, contents: Mapping[str, bytes] = SPLITS, name: str = "datasets--org--rows") -> Path:
    """A cache as huggingface_hub leaves it."""
    home = folder / name
    for file, content in contents.items():
        blob, link = home / "blobs" / sha1(content).hexdigest(), home / "snapshots" / SHA / file
        for path in (blob, link):
            path.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(SHA)
    return folder


SCRIPT = """
import json, sys
from spmdrl.dataflow.data.data_rows import read_rows
from spmdrl.nouns.settings.data_config import DataConfig
try:
    parts = read_rows(sys.argv[1], DataConfig(), key=sys.argv[2])
    print(json.dumps([[row.prompt, row.place] for part in parts for row in part.rows]))
except ValueError as error:
    print(json.dumps(str(error)))
"""


def started(cache: Path, url: str, key: str = "data.train", **environment: str) -> subprocess.Popen[str]:
    # huggingface_hub reads its variables as it is imported.
    variables = os.environ | {"HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1"} | environment
    command = [sys.executable, "-c", SCRIPT, url, key]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)


def found(process: subprocess.Popen[str]) -> Any:
    output, _ = process.communicate(timeout=120)
    return json.loads(output.splitlines()[-1])


def offline(cache: Path, url: str, key: str = "data.train") -> Any:
    return found(started(cache, url, key, HF_HUB_OFFLINE="1"))


def test_a_cached_data_set_is_read_offline_under_its_name_on_the_hub(tmp_path: Path) -> None:
    cache = cached(tmp_path)
    # Nothing is written there.
    for folder in (*(path for path in cache.rglob("*") if path.is_dir()), cache):
        folder.chmod(0o555)
    try:
        rows = offline(cache, "hub://org/rows")
        assert rows == [
            ["a", "hub://org/rows/data/train-00000-of-00002.jsonl:1"],
            ["b", "hub://org/rows/data/train-00000-of-00002.jsonl:2"],
            ["c", "hub://org/rows/data/train-00001-of-00002.jsonl:1"],
        ]
        assert [prompt for prompt, _ in offline(cache, "hub://org/rows", "data.eval")] == ["held out"]
    finally:
        for folder in (cache, *(path for path in cache.rglob("*") if path.is_dir())):
            folder.chmod(0o755)


def test_what_the_cache_lacks_is_named_with_a_way_out(tmp_path: Path) -> None:
    lacking = {name: content for name, content in SPLITS.items() if "00001-of-00002" not in name}
    cache = cached(tmp_path, lacking)
    assert "of hub://org/rows, but not data/train-00001-of-00002.jsonl" in offline(cache, "hub://org/rows")
    message = offline(cache, "hub://org/others")
    assert "hub://org/others is neither on the hub nor in its cache" in message
    assert "hf download --repo-type dataset org/others" in message


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("hub://org/rows?spilt=train", "there is no setting 'spilt'; did you mean 'split'"),
        ("hub://a/b/c", "names 'a/b/c', but must name a data set"),
        ("openai/gsm8k", "a data set of the hub is hub://openai/gsm8k"),
    ],
)
def test_a_wrong_name_is_refused_before_anything_is_asked_for(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_rows(url, DataConfig())


@contextmanager
def serving(contents: Mapping[str, bytes]) -> Iterator[tuple[str, Counter[str]]]:
    """Serve one data set by the hub's interface; yields its address and how often each file was sent."""
    sent: Counter[str] = Counter()

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path.startswith("/api/datasets/org/rows/tree/"):
                tree = [
                    {"type": "file", "path": name, "size": len(content), "oid": sha1(content).hexdigest()}
                    for name, content in contents.items()
                ]
                return self._answer(json.dumps(tree).encode())
            if path.startswith("/api/datasets/org/rows"):
                siblings = [{"rfilename": name} for name in contents]
                return self._answer(json.dumps({"id": "org/rows", "sha": SHA, "siblings": siblings}).encode())
            name = path.removeprefix(f"/datasets/org/rows/resolve/{SHA}/")
            if name not in contents:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                return self.end_headers()
            if self.command == "GET":
                sent[name] += 1
            self._answer(contents[name], ETag=f'"{sha1(contents[name]).hexdigest()}"')

        do_HEAD = do_GET

        def _answer(self, body: bytes, **headers: str) -> None:
            self.send_response(200)
            for key, value in {"Content-Length": str(len(body)), "X-Repo-Commit": SHA, **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", sent
        finally:
            server.shutdown()


def test_processes_of_one_cache_fetch_only_the_split_and_each_file_once(tmp_path: Path) -> None:
    with serving(SPLITS) as (address, sent):
        ranks = [started(tmp_path, "hub://org/rows", HF_ENDPOINT=address) for _ in range(3)]
        results = [found(rank) for rank in ranks]
        assert [prompt for prompt, _ in results[0]] == ["a", "b", "c"] and results[0] == results[1] == results[2]
        assert sent == {name: 1 for name in SPLITS if "test" not in name}
        message = found(started(tmp_path, "hub://org/others", HF_ENDPOINT=address))
        assert "RepositoryNotFoundError" in message and "hf auth login" in message
    # What was fetched is read offline, and what wasn't is named.
    assert offline(tmp_path, "hub://org/rows") == results[0]
    assert "hub://org/rows" in offline(tmp_path, "hub://org/rows", "data.eval")
