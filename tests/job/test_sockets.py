"""Which sockets a job listens on while it trains, as the kernel lists them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.jobs import ROOT, environment, metrics_of, tiny_config, torchrun_script

from spmdrl.runtime.supervision.stop_request import STOPPED
from spmdrl.runtime.workers.descent import ProcessTree

LISTENING = "0A"


def listening(pids: list[int]) -> dict[int, list[str]]:
    """By process, the addresses that it listens on."""
    sockets = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING:
                sockets[fields[9]] = fields[1].rpartition(":")[0]
    found = {}
    for pid in pids:
        inodes = set()
        for name in os.listdir(f"/proc/{pid}/fd") if Path(f"/proc/{pid}/fd").exists() else ():
            try:
                inodes.add(os.readlink(f"/proc/{pid}/fd/{name}").removeprefix("socket:[").removesuffix("]"))
            except OSError:
                continue
        found[pid] = [sockets[inode] for inode in inodes if inode in sockets]
    return found


def is_rank(pid: int) -> bool:
    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return b"spmdrl" in command and b"train" in command and b"torch.distributed.run" not in command


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 1])
def test_ranks_listen_on_loopback_alone_until_their_script_is_asked_to_stop(tmp_path, ranks):
    """Beside them one store of torchrun does too. The script passes the request on, and has the code of the ranks."""
    launcher = torchrun_script(tmp_path) if ranks > 1 else [sys.executable, "-m", "spmdrl"]
    arguments = [str(tiny_config(tmp_path)), f"run.dir={tmp_path / 'run'}", "train.max_steps=100000"]
    command = [*launcher, "train", *arguments]
    own = environment(PYTHON=sys.executable, RANKS_PER_NODE=str(ranks))
    screen = tmp_path / "screen"
    with screen.open("w") as shown:
        job = subprocess.Popen(command, env=own, cwd=ROOT, stdout=shown, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 100
        while not (tmp_path / "run/metrics.jsonl").exists() or len(metrics_of(tmp_path / "run")) < 2:
            assert job.poll() is None and time.monotonic() < deadline, screen.read_text()
            time.sleep(0.2)
        pids = [job.pid, *(one.pid for one in ProcessTree(job.pid).members())]
        found = listening(pids)
        of_ranks = {pid for pid in pids if is_rank(pid)}
        job.send_signal(signal.SIGUSR1)
        _, errors = job.communicate(timeout=60)
    finally:
        job.terminate()
        job.wait(60)
    assert job.returncode == STOPPED, errors
    assert errors.splitlines()[-1].startswith("spmdrl: stopped by SIG"), errors
    assert len(list((tmp_path / "run/checkpoints").iterdir())) == 1
    assert len(of_ranks) == ranks and len(pids) > 2 * ranks, "guards and reward processes are there too"
    others = [len(addresses) for pid, addresses in found.items() if addresses and pid not in of_ranks]
    # The other one of torchrun's stores, whose contents it runs, is a file.
    assert others == ([1] if ranks > 1 else [])
    # 127.0.0.1, in the kernel's order of bytes.
    assert {address for rank in of_ranks for address in found[rank]} <= {"0100007F"}
    assert ranks == 1 or any(found.values()), "ranks of one job reach each other somehow"
