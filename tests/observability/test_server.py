"""Served pages: for whoever has the token, from the run folders alone, and as new as the runs."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from spmdrl.observability.log import MetricsLog
from spmdrl.observability.report import run_index
from spmdrl.observability.report.page import Header, Section
from spmdrl.observability.report.report import _contents, main
from spmdrl.observability.report.run_files import is_run, read_run
from spmdrl.observability.report.run_index import MOST_POINTS, Curve, RunIndex
from spmdrl.observability.report.server import HOST, Pages, ReportServer
from spmdrl.runtime.supervision.holder import held
from tests.observability.synthetic import write_run
from tests.support.jobs import ROOT, environment

OWN = "localhost:8000"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    top = tmp_path_factory.mktemp("served") / "runs"
    for name in ("a", "b"):
        write_run(top / name, num_steps=12, num_ranks=1)
    (top / "notes").mkdir()
    (top / "notes" / "secret.txt").write_text("secret")
    (top / "link").symlink_to(top / "a")
    return top


@pytest.fixture
def pages(runs) -> Pages:
    return Pages([runs], _contents)


def got(pages: Pages, path: str, host: str = OWN) -> object:
    answer = pages.answer(f"/{pages.token}/{path}", host)
    assert answer.status == 200, (path, answer)
    return json.loads(answer.body) if answer.kind == "application/json" else answer.body.decode()


def test_a_stranger_without_the_token_gets_nothing(pages):
    for target in (
        "/",
        "",
        "*",
        "//",
        "/runs.json",
        f"/{pages.token[:-1]}/",
        f"/{pages.token}x/runs.json",
        "/run/a/",
        "/\u00e9/",
    ):
        answer = pages.answer(target, OWN)
        assert answer.status == 403 and b"a\n" not in answer.body[-2:] and pages.token.encode() not in answer.body
    assert len(pages.token) == 32 and pages.token != Pages([], _contents).token


@pytest.mark.parametrize(
    "host", ["", "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example:80"]
)
def test_a_name_that_isnt_loopback_gets_nothing_even_with_the_token(pages, host):
    assert pages.answer(f"/{pages.token}/", host).status == 403
    assert pages.answer(f"/{pages.token}/", "127.0.0.1").status == pages.answer(f"/{pages.token}/", OWN).status == 200


@pytest.mark.parametrize(
    "path",
    [
        "../", "run/", "run/a", "run/a/metrics.jsonl", "run/a/summary.json", "run/..%2F..%2Fetc/", "run/../a/",
        "run/%2e%2e/", "run/notes/", "run/notes%2Fsecret.txt/", "run/link/", "run/a%2F..%2Fb/", "run/a%00/",
        "run/a/../../notes/secret.txt", "notes/secret.txt", "run//etc/passwd", "run/%2Fetc%2Fpasswd/",
        "run/a/parts.json/x",
    ],
)  # fmt: skip
def test_only_runs_have_pages_and_no_file_is_reached_by_a_path(pages, path):
    answer = pages.answer(f"/{pages.token}/{path}", OWN)
    assert answer.status == 404 and b"secret" not in answer.body


def test_the_index_has_a_row_of_each_run(pages, runs):
    found = got(pages, "runs.json")
    assert [row["key"] for row in found["rows"]] == ["a", "b"] and found["settings"] == []
    row = found["rows"][0]
    assert (row["state"], row["step"], row["measure"], row["verdict"]) == ("done", 12, "reward", "ok")
    last = json.loads((runs / "a" / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["last"] == last["reward"] and len(row["curve"]) == 12 and row["changed"] > 1e9


def test_a_page_is_the_report_with_its_data_and_says_what_changed(pages, runs):
    page = got(pages, "run/a/")
    assert (
        '<section id="curves">' in page
        and '<section id="plan" hidden>' in page
        and "connect-src &#39;self&#39;" in page
    )
    version = int(page.partition("parts.json?known=")[2].partition('"')[0])
    nothing = got(pages, f"run/a/parts.json?known={version}")
    assert nothing == {"version": version, "charts": {}, "sections": {}}
    everything = got(pages, "run/a/parts.json?known=x")
    assert {"curves", "samples", "plan"} <= everything["sections"].keys() and "<svg" in everything["sections"]["curves"]
    assert everything["samples"] and "so we think" not in everything["sections"]["samples"]


def test_a_step_changes_what_it_is_in_and_nothing_else(tmp_path: Path, monkeypatch):
    run = write_run(tmp_path / "runs" / "a", num_steps=3, num_ranks=1)
    pages = Pages([tmp_path / "runs"], _contents)
    version = got(pages, "run/a/parts.json?known=0")["version"]
    log = MetricsLog(run, ["jsonl"])
    log.write(4, {"reward": 0.125, "new/metric": 2.0})
    pages._live["a"]._wait_until = 0.0
    news = got(pages, f"run/a/parts.json?known={version}")
    assert news["version"] == version + 1 and "samples" not in news
    assert {"curves", "detail"} <= news["sections"].keys() and not {"config", "samples", "memory"} & news[
        "sections"
    ].keys()
    assert "new/metric" in news["sections"]["detail"] and news["charts"]["curves"][0][0]["y"][-1] == 0.125
    assert got(pages, "runs.json")["rows"][0]["last"] == 0.125
    log.close()


def slow_contents(folder: Path) -> tuple[Header, Iterable[Section]]:
    time.sleep(0.2)
    return _contents(folder)


def kept_contents(folder: Path) -> tuple[Header, Iterable[Section]]:
    kept.append(read_run(folder))
    return _contents(folder)


def lost_contents(folder: Path) -> tuple[Header, Iterable[Section]]:
    os._exit(9)


kept: list[object] = []


def test_a_page_is_not_made_more_often_than_it_takes_time(tmp_path: Path):
    write_run(tmp_path / "a", num_steps=2, num_ranks=1)
    pages = Pages([tmp_path / "a"], slow_contents)
    log = MetricsLog(tmp_path / "a", ["jsonl"])
    for step in range(3, 8):
        log.write(step, {"reward": 0.5})
        assert got(pages, "run/a/parts.json?known=0")["version"] == 1
    log.close()


def test_a_page_is_drawn_by_a_process_that_takes_the_runs_records_with_it(tmp_path: Path):
    write_run(tmp_path / "a", num_steps=2, num_ranks=1)
    pages = [Pages([tmp_path / "a"], one) for one in (kept_contents, lost_contents)]
    assert got(pages[0], "run/a/parts.json?known=0")["version"] == 1 and not kept
    with pytest.raises(RuntimeError, match="its process ended with 9"):
        got(pages[1], "run/a/parts.json?known=0")


def test_a_page_that_wasnt_drawn_is_drawn_for_the_next_who_asks(tmp_path: Path):
    write_run(tmp_path / "a", num_steps=2, num_ranks=1)
    pages = Pages([tmp_path / "a"], lost_contents)
    for path in ("run/a/", "run/a/parts.json?known=0"):
        with pytest.raises(RuntimeError, match="its process ended with 9"):
            got(pages, path)
    pages._live["a"]._contents = _contents
    assert '<section id="curves">' in got(pages, "run/a/")


def test_runs_below_a_folder_are_found_with_their_warm_start_and_new_ones_appear(tmp_path: Path):
    index = RunIndex([tmp_path])
    assert index.rows()["rows"] == []
    for name in ("sweep/lr1", "sweep/lr1/warm_start", "sweep/lr1/eval/x", "single", ".hidden/x"):
        log = MetricsLog(tmp_path / name, ["jsonl"])
        log.write(1, {"loss": 2.0})
        log.close()
    found = {row["key"]: row for row in index.rows()["rows"]}
    assert found.keys() == {"single", "sweep/lr1", "sweep/lr1/warm_start"}
    assert found["single"]["measure"] == "loss" and found["single"]["state"] == "failed"
    assert index.folder_of("sweep/lr1") == tmp_path / "sweep/lr1" and index.folder_of("..") is None
    one, two = RunIndex([tmp_path / "single"]), RunIndex([tmp_path / "sweep", tmp_path / "single"])
    assert [row["key"] for row in one.rows()["rows"]] == ["single"]
    assert [row["key"] for row in two.rows()["rows"]] == ["sweep/lr1", "sweep/lr1/warm_start", "single"]


def test_what_is_gone_meanwhile_or_cant_be_read_hides_no_other_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("forbidden", "gone", "gone_later", "last"):
        log = MetricsLog(tmp_path / name, ["jsonl"])
        log.write(1, {"loss": 2.0})
        log.close()
    index = RunIndex([tmp_path])
    assert len(index.rows()["rows"]) == 4

    def is_run_meanwhile(folder: Path) -> bool:
        if folder.name == "forbidden":
            raise PermissionError(folder)
        found = is_run(folder)
        if folder.name == "gone":
            shutil.rmtree(folder)
        return found

    monkeypatch.setattr(run_index, "is_run", is_run_meanwhile)
    (tmp_path / "gone_later" / "metrics.jsonl").unlink()
    (tmp_path / "gone_later" / "metrics.jsonl").mkdir()
    assert [row["key"] for row in index.rows()["rows"]] == ["last"] and index.folder_of("gone_later") is None
    shutil.rmtree(tmp_path)
    assert index.rows()["rows"] == []


def test_runs_of_one_name_are_told_apart_by_as_much_of_their_path_as_that_takes(tmp_path: Path):
    names = ("a/runs/x", "b/runs/x", "c/a/runs/x")
    for loss, name in enumerate(names):
        log = MetricsLog(tmp_path / name, ["jsonl"])
        log.write(1, {"loss": float(loss)})
        log.close()

    def losses(*folders: str) -> dict[str, float]:
        index = RunIndex([tmp_path / folder for folder in folders])
        found = [{row["key"]: row["last"] for row in index.rows()["rows"]} for _ in range(2)]
        assert found[0] == found[1] and all(index.folder_of(key) for key in found[0])
        return found[0]

    assert losses("a/runs", "b/runs", "a/../b/runs") == {"a/runs/x": 0.0, "b/runs/x": 1.0}
    assert losses(*names[:2]) == {"a/runs/x": 0.0, "b/runs/x": 1.0}
    assert losses("a/runs", "b/runs/x") == {"runs/x": 0.0, "x": 1.0}
    # Named by c/a's last part alone, the run below it would be a/runs/x too.
    below = f"{tmp_path.name}/c/a/runs/x"
    assert losses("a/runs/x", "b/runs/x", "c/a") == {"a/runs/x": 0.0, "b/runs/x": 1.0, below: 2.0}
    pages = Pages([tmp_path / name for name in names[:2]], _contents)
    for row in got(pages, "runs.json")["rows"]:
        assert "<h1" in got(pages, f"run/{quote(row['key'], safe='')}/")


def test_the_state_is_what_the_folder_says(tmp_path: Path):
    run = write_run(tmp_path / "a", num_steps=2, num_ranks=1)

    def state() -> str:
        return RunIndex([run]).rows()["rows"][0]["state"]

    def verdict(text: str) -> None:
        (run / "summary.json").write_text(json.dumps({"verdict": text}))

    states = []
    for text in ("done", "stopped", "failed", "unsaved", "running"):
        verdict(text)
        states.append(state())
    assert states == ["done", "stopped", "failed", "failed", "failed"], "nobody holds the folder of a killed run"
    with held(run):
        assert state() == "running"
        for path in (*run.glob("*"), *run.glob("timeline/*")):
            os.utime(path, (1e9, 1e9))
        assert state() == "stalled"


def test_settings_that_differ_are_those_of_the_index_and_alerts_stand_in_it(tmp_path: Path):
    for name, lr in (("a", "1.0e-06"), ("b", "2.0e-06")):
        run = write_run(tmp_path / name, num_steps=2, num_ranks=1)
        text = (run / "config.resolved.yaml").read_text().replace("1.0e-06", lr).replace("<i>run</i>", name)
        (run / "config.resolved.yaml").write_text(text)
    (tmp_path / "b" / "alerts.jsonl").write_text(
        '{"step": 3, "symptom": "kl", "text": "t"}\n{"step": 4, "symptom": "kl", "x": NaN}\n'
    )
    found = RunIndex([tmp_path]).rows()
    assert found["settings"] == ["optim.lr"] and [row["settings"] for row in found["rows"]] == [
        ["1.0e-06"],
        ["2.0e-06"],
    ]
    assert [row["alerts"] for row in found["rows"]] == [0, 2] and found["rows"][1]["alert"]["step"] == 4
    assert got(Pages([tmp_path], _contents), "runs.json")["rows"][1]["alert"]["x"] == "NaN"


def test_a_curve_reads_what_is_new_and_keeps_a_bounded_number_of_points(tmp_path: Path):
    curve, path = Curve(tmp_path / "metrics.jsonl"), tmp_path / "metrics.jsonl"
    assert curve.read().points == []
    with path.open("a") as file:
        for step in range(1, 3001):
            file.write(json.dumps({"a": 1, "reward": step / 10, "step": step, "time/step": 2.5}) + "\n")
            if step % 100 == 0:
                file.write('{"reward": 9')
                file.flush()
                assert curve.read().step == step and curve.last == step / 10
                file.write('e9, "step": "x"}\n')
    assert len(curve.points) <= MOST_POINTS and curve.seconds == 2.5 and curve._offset < path.stat().st_size
    total, count = (sum(values) for values in zip(*curve._sums, strict=True))
    assert count == 3029 and total == pytest.approx(sum(range(1, 3001)) / 10 + 29 * 9e9)
    # A resumed run replaces the file by its beginning.
    (tmp_path / "new").write_text('{"reward": 0.5, "step": 1}\n{"reward": "NaN", "step": 2}\n')
    (tmp_path / "new").replace(path)
    assert curve.read().points == [0.5] and curve.step == 2


@pytest.fixture
def served(runs) -> Iterator[ReportServer]:
    with ReportServer(Pages([runs], _contents), 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def asked(server: ReportServer, method: str, path: str, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(HOST, server.server_port, timeout=20)
    connection.request(method, path, headers=headers)
    return connection.getresponse()


def test_over_http_it_takes_get_alone_and_answers_as_a_browser_needs(served):
    answer = asked(served, "GET", f"/{served.pages.token}/run/a/", **{"Accept-Encoding": "gzip"})
    assert (
        answer.status == 200 and answer.headers["Content-Encoding"] == "gzip" and "spmdrl" in answer.headers["Server"]
    )
    assert answer.headers["Cache-Control"] == "no-store" and answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Referrer-Policy"] == "no-referrer" and "Python" not in answer.headers["Server"]
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS", "CONNECT", "TRACE"):
        assert asked(served, method, f"/{served.pages.token}/").status == 501
    assert asked(served, "GET", f"/{served.pages.token}/", Host="evil.example").status == 403
    assert asked(served, "GET", f"http://evil.example/{served.pages.token}/", Host="evil.example").status == 403
    assert asked(served, "GET", "/").status == 403


def test_it_listens_on_loopback_alone(served):
    assert served.server_address[0] == "127.0.0.1" and served.url.startswith(f"http://127.0.0.1:{served.server_port}/")
    others = {entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {
        "127.0.0.1",
        "127.0.1.1",
    }
    for address in others:
        with pytest.raises(OSError):
            socket.create_connection((address, served.server_port), timeout=2)


def test_connections_that_send_nothing_keep_nobody_else_out(served):
    idle = [socket.create_connection((HOST, served.server_port)) for _ in range(60)]
    try:
        assert threading.active_count() < 45
        for one in idle[:30]:
            one.close()
        deadline = time.monotonic() + 15
        while True:
            try:
                assert asked(served, "GET", f"/{served.pages.token}/").status == 200
                break
            except (ConnectionError, http.client.HTTPException):
                assert time.monotonic() < deadline
                time.sleep(0.1)
    finally:
        for one in idle:
            one.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_verb_prints_the_address_ends_at_a_signal_and_leaves_nothing(runs, tmp_path, number):
    # What a shell starts in the background ignores Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, "-m", "spmdrl", "report", str(runs), "--serve"]
    own = environment() | {"TMPDIR": str(tmp_path)}
    verb = subprocess.Popen(command, env=own, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        address, tunnel = verb.stdout.readline().split()[1], verb.stdout.readline()
        port, token = int(address.split(":")[2].split("/")[0]), address.split("/")[3]
        connection = http.client.HTTPConnection(HOST, port, timeout=20)
        connection.request("GET", f"/{token}/runs.json")
        assert len(json.loads(connection.getresponse().read())["rows"]) == 2
        verb.send_signal(number)
        assert verb.wait(30) == 0 and f"ssh -L {port}:127.0.0.1:{port}" in tunnel and not [*tmp_path.iterdir()]
    finally:
        signal.signal(signal.SIGINT, before)
        verb.kill()
        verb.communicate()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["nowhere", "--serve"], "nowhere is no folder"),
        (["--serve", "runs"], "runs is no port"),
    ],
)
def test_wrong_words_are_one_message(arguments, why, capsys):
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 2 and why in capsys.readouterr().err


def test_a_port_that_is_taken_is_one_message(served, runs, capsys):
    assert main([str(runs), "--serve", str(served.server_port)]) == 2
    assert f"port {served.server_port} can't be opened" in capsys.readouterr().err


def test_a_run_that_is_gone_has_no_page(tmp_path: Path):
    run = write_run(tmp_path / "runs" / "a", num_steps=2, num_ranks=1)
    pages = Pages([tmp_path / "runs"], _contents)
    got(pages, "run/a/")
    run.rename(tmp_path / "moved")
    pages._live["a"]._wait_until = 0.0
    assert pages.answer(f"/{pages.token}/run/a/", OWN).status == 404


def test_few_pages_are_kept(tmp_path: Path):
    for number in range(6):
        write_run(tmp_path / str(number), num_steps=2, num_ranks=1)
    pages = Pages([tmp_path], _contents)
    for number in range(6):
        got(pages, f"run/{number}/parts.json?known=0")
    assert list(pages._live) == ["2", "3", "4", "5"]
