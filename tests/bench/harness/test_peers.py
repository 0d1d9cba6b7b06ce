"""Commands beside a bench: they reply line by line, and none of their processes is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from spmdrl.verbs.doctor.commands import CommandFailed, run_to_end
from tests.bench.harness.peers import running

DOUBLES = """
import sys
from tests.bench.harness.replies import open_replies
reply = open_replies()
print("what a library prints")
for line in sys.stdin:
    reply({"twice": 2 * int(line)})
"""


def test_a_peer_replies_line_by_line_and_its_stderr_is_quoted_where_it_does_not():
    with running([sys.executable, "-c", DOUBLES], {"PYTHONPATH": os.pathsep.join(sys.path)}, 20) as peer:
        assert [peer.request("3"), peer.request("4")] == [{"twice": 6}, {"twice": 8}]
        with pytest.raises(RuntimeError, match="sent no reply:\n(.|\n)*invalid literal"):
            peer.request("three")


def test_a_peer_that_replies_too_late_is_ended():
    with running(["sleep", "60"], {}, 0.2) as peer, pytest.raises(RuntimeError, match="sleep 60 sent no reply"):
        peer.reply()


def test_what_a_command_printed_is_returned_without_its_stderr():
    command = [sys.executable, "-c", "import sys; print('out'); print('log', file=sys.stderr)"]
    assert run_to_end(command, {}, 20) == "out\n"


needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds daemons through /proc")
LEAVES_A_DAEMON = """
import subprocess, sys
subprocess.Popen(["sleep", "61.2{code}"], start_new_session=True)
sys.exit({code})
"""


def _is_running(command: str) -> bool:
    lines = subprocess.run(["ps", "-eo", "stat,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return any(line.endswith(command) and not line.startswith("Z") for line in lines)


@needs_proc
@pytest.mark.parametrize("code", [0, 3])
def test_a_command_leaves_no_daemon_behind(code: int):
    command = [sys.executable, "-c", LEAVES_A_DAEMON.format(code=code)]
    with pytest.raises(RuntimeError, match="ended with 3") if code else nullcontext():
        run_to_end(command, {}, 20)
    assert not _is_running(f"sleep 61.2{code}")


RUNS_ANOTHER = "from spmdrl.verbs.doctor.commands import run_to_end; run_to_end(['sleep', '61.5'], {}, 60)"


@needs_proc
def test_a_command_that_takes_too_long_is_ended_with_those_that_it_runs():
    with pytest.raises(CommandFailed) as failed:
        run_to_end([sys.executable, "-c", RUNS_ANOTHER], {"PYTHONPATH": os.pathsep.join(sys.path)}, 4)
    assert failed.value.how == "nothing within 4 s"
    assert not _is_running("sleep 61.5")


def test_a_command_that_takes_too_long_is_ended():
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="nothing within 0.2 s"):
        run_to_end(["sleep", "30"], {}, 0.2)
    assert time.monotonic() - started < 10


@needs_proc
def test_a_terminated_bench_ends_its_command():
    bench = "from spmdrl.verbs.doctor.commands import run_to_end; run_to_end(['sleep', '61.75'], {}, 60)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", bench], env=environment)
    deadline = time.monotonic() + 20
    while not _is_running("sleep 61.75") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _is_running("sleep 61.75")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 128 + signal.SIGTERM
    assert not _is_running("sleep 61.75")
