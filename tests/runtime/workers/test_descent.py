"""The descendants of a process are found and ended, whatever sessions and parents they have."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spmdrl.runtime.workers.descent import ProcessTree

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

# A tree of 15 processes in several sessions, whose leaves start others for as long as they live.
RESTLESS = """
import os, time
from spmdrl.runtime.workers.descent import adopt_orphans
adopt_orphans()
print("x", flush=True)
for depth in range(4):
    if os.fork() and depth:
        os.setsid() if os.getpid() != os.getpgrp() else None
while True:
    time.sleep(0.01)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(30)
        os._exit(0)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
"""


def test_a_tree_that_grows_while_it_is_ended_is_ended_to_the_last():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", RESTLESS], stdout=subprocess.PIPE, env=environment) as root:
        try:
            assert root.stdout is not None
            root.stdout.readline()
            tree = ProcessTree(root.pid)
            deadline = time.monotonic() + 60
            while len(tree.members()) < 40 and time.monotonic() < deadline:
                time.sleep(0.02)
            seen = [one.pid for one in tree.members()]
            assert len(seen) >= 40
            root.send_signal(signal.SIGSTOP)  # the root itself isn't the tree's to end
            assert tree.end()
            assert tree.members() == []
            # Killed ones may still be on their way out.
            deadline = time.monotonic() + 5
            while (left := [pid for pid in seen if _state(pid) != "Z"]) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert left == []
        finally:
            # Where the test failed, they would go on for ever.
            root.send_signal(signal.SIGSTOP)
            ProcessTree(root.pid).end()
            root.kill()


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


# Two processes in sessions of their own, one of which a thread started, and one whose parent has ended.
STEADY = """
import os, threading, time
from spmdrl.runtime.workers.descent import adopt_orphans
adopt_orphans()

def start(is_orphan=False):
    if os.fork() == 0:
        os.setsid()
        if is_orphan and os.fork():
            os._exit(0)
        if is_orphan:
            print("x", flush=True)
        time.sleep(30)
        os._exit(0)

start()
starting = threading.Thread(target=lambda: (start(), time.sleep(30)), daemon=True)
starting.start()
time.sleep(0.2)
start(is_orphan=True)
os.wait()
time.sleep(30)
"""


def test_the_kernels_lists_name_the_same_processes_as_all_of_them_do():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", STEADY], stdout=subprocess.PIPE, env=environment) as root:
        try:
            assert root.stdout is not None
            root.stdout.readline()
            time.sleep(0.1)  # until the parent of the one that spoke has ended
            tree = ProcessTree(root.pid)
            assert len(tree.listed()) == 3 and set(tree.listed()) == set(tree.members())
        finally:
            ProcessTree(root.pid).end()
            root.kill()


def test_processes_of_others_are_no_members():
    with subprocess.Popen(["sleep", "30"]) as child, subprocess.Popen(["sleep", "30"]) as other:
        try:
            tree = ProcessTree(child.pid)
            assert tree.members() == []
            assert other.pid in {one.pid for one in ProcessTree(os.getpid()).members()}
            assert tree.end() and other.poll() is None
        finally:
            child.kill()
            other.kill()
