"""Ranks end with the launcher that started them, and with nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.jobs import environment

from spmdrl.runtime.supervision.launcher import launcher_of

NAP = """
import os, time
from spmdrl.runtime.supervision.launcher import end_with_launcher, remove_empty_folders
end_with_launcher()
remove_empty_folders()
with open(os.environ["NAPPING"] + os.environ.get("LOCAL_RANK", ""), "w") as file:
    file.write(str(os.getpid()))
time.sleep(100)
"""

# How msrun starts its workers, each in a session of its own, and ends at SIGTERM.
MSRUN = """
import os, subprocess, sys
subprocess.Popen(sys.argv[1:], env={**os.environ, "MS_ROLE": "MS_WORKER"}, preexec_fn=os.setsid).wait()
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def pid_in(path: Path) -> int:
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, path
        time.sleep(0.02)
    return int(path.read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("behind_script", [False, True])
def test_ranks_end_with_torchrun_even_behind_a_script(tmp_path, behind_script):
    (tmp_path / "nap.py").write_text(NAP)
    script, tmp = tmp_path / "nap.sh", tmp_path / "tmp"
    tmp.mkdir()
    script.write_text(f"#!/bin/sh\n{sys.executable} {tmp_path / 'nap.py'}\n:\n")
    script.chmod(0o755)
    program = ["--no-python", str(script)] if behind_script else [str(tmp_path / "nap.py")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *program]
    own = environment(NAPPING=str(tmp_path / "pid"), TMPDIR=str(tmp))
    launcher = subprocess.Popen(command, env=own, stderr=subprocess.DEVNULL)
    try:
        ranks = [pid_in(tmp_path / f"pid{rank}") for rank in range(2)]
        assert [launcher_of(rank) for rank in ranks] == [launcher.pid] * 2
    finally:
        launcher.send_signal(signal.SIGKILL if behind_script else signal.SIGUSR1)
        launcher.wait()
    deadline = time.monotonic() + 5
    while any(map(is_running, ranks)):
        assert time.monotonic() < deadline, ranks
        time.sleep(0.02)
    assert list(tmp.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_whose_launcher_ended_before_it_began_ends_at_once(tmp_path):
    (tmp_path / "nap.py").write_text(NAP)
    own = environment(NAPPING=str(tmp_path / "pid"), TORCHELASTIC_RUN_ID="a", TORCHELASTIC_USE_AGENT_STORE="True")
    # Nobody above it but init: the shell ends first, and this test's process isn't a parent of what it leaves.
    late = f"(sleep 0.5; {sys.executable} {tmp_path / 'nap.py'}; echo $? > {tmp_path / 'code'}) &"
    subprocess.run(["sh", "-c", late], env=own, check=True)
    assert pid_in(tmp_path / "code") == 128 + signal.SIGKILL
    assert not (tmp_path / "pid").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_worker_ends_with_msrun(tmp_path, number):
    (tmp_path / "nap.py").write_text(NAP)
    (tmp_path / "msrun").write_text(MSRUN)
    own = environment(NAPPING=str(tmp_path / "pid"), LOCAL_RANK="0")
    command = [sys.executable, tmp_path / "msrun", sys.executable, tmp_path / "nap.py"]
    launcher = subprocess.Popen(command, env=own)
    try:
        worker = pid_in(tmp_path / "pid0")
        assert launcher_of(worker) == launcher.pid
    finally:
        launcher.send_signal(number)
        launcher.wait()
    deadline = time.monotonic() + 5
    while is_running(worker):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_plain_python_outlives_the_shell_that_started_it(tmp_path):
    (tmp_path / "nap.py").write_text(NAP)
    own = environment(NAPPING=str(tmp_path / "pid"))
    subprocess.run(["sh", "-c", f"{sys.executable} {tmp_path / 'nap.py'} &"], env=own, check=True)
    pid = pid_in(tmp_path / "pid")
    time.sleep(0.3)
    assert is_running(pid)
    os.kill(pid, signal.SIGKILL)
