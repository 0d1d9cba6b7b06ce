"""A folder has one holder at a time, and the lock goes with the process, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from tests.support.jobs import environment

from spmdrl.runtime.supervision.holder import LOCK_FILE, FolderHeld, Holder, held, is_held

HOLD = """
import sys, time
from pathlib import Path
from spmdrl.runtime.supervision.holder import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def other(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_process_is_refused_with_the_holders_name(tmp_path, other):
    started = time.strftime("%Y-%m-%d")
    with pytest.raises(FolderHeld, match=rf"in use by process {other.pid} on .*, started {started}"), held(tmp_path):
        pass
    assert is_held(tmp_path)


def test_a_killed_process_holds_nothing(tmp_path, other):
    os.kill(other.pid, signal.SIGKILL)
    with held(tmp_path, wait_seconds=10):
        assert is_held(tmp_path)
    assert not is_held(tmp_path)


def test_one_that_waits_gets_the_folder_when_it_is_free(tmp_path, other):
    timer = threading.Timer(0.3, other.kill)
    timer.start()
    with held(tmp_path, wait_seconds=10):
        assert other.wait(10) == -signal.SIGKILL
    timer.join()


def test_a_folder_that_was_moved_while_held_can_be_taken_anew(tmp_path):
    folder = tmp_path / "run"
    with held(folder):
        (folder / "metrics.jsonl").touch()
        folder.rename(tmp_path / "run.1")
        with held(folder):
            assert json.loads((folder / LOCK_FILE).read_text())["pid"] == os.getpid()


def test_a_folder_of_which_nothing_came_is_gone_again(tmp_path):
    with held(tmp_path / "new"):
        assert (tmp_path / "new").is_dir()
    assert not (tmp_path / "new").exists()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "metrics.jsonl").touch()
    with held(tmp_path / "kept"):
        pass
    assert (tmp_path / "kept" / "metrics.jsonl").exists()


def test_a_broken_record_names_nobody_and_stops_nobody(tmp_path):
    for content in (b"", b"[1]", b"\xff", b'{"pid": 1}'):
        (tmp_path / LOCK_FILE).write_bytes(content)
        with held(tmp_path):
            assert json.loads((tmp_path / LOCK_FILE).read_bytes())["pid"] == os.getpid()


def test_only_processes_of_this_host_are_known_to_have_ended():
    me = Holder.this_process()
    assert not me.is_gone
    assert Holder(me.host, 2**30, me.started, me.boot).is_gone
    assert Holder(me.host, me.pid, me.started, "another boot").is_gone
    assert not Holder("elsewhere", 2**30, me.started, me.boot).is_gone
