from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.jobs import ROOT, environment

MEETINGS = {
    "store": ["--standalone"],
    "file": ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file", "--local-addr=127.0.0.1"],
}
# Kills a rank in its first life, in the middle of collectives, and writes what the second life adds up.
PROGRAM = r"""
import os, signal, sys
import torch, torch.distributed as dist
from spmdrl.resources.world import open_world

with open_world("cpu", 60.0, start_timeout_seconds=60.0) as world:
    total = torch.zeros(1)
    for step in range(20):
        total += 1
        part = total.clone()
        dist.all_reduce(part)
        if step == 5 and world.rank == int(sys.argv[1]) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    # In one piece, as both ranks write to the same pipe.
    os.write(1, f"sum {world.rank} {part.item()} {os.environ['TORCHELASTIC_RESTART_COUNT']}\n".encode())
"""


def run(meeting: str, folder: Path, *arguments: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    launcher = [sys.executable, "-m", "torch.distributed.run", *MEETINGS[meeting], f"--nproc-per-node={ranks}"]
    command = [*launcher, "--max-restarts=1", str(program)]
    env = environment(XDG_CACHE_HOME=str(folder), TMPDIR=str(folder))
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=180, env=env, cwd=ROOT, check=False
    )


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("meeting", MEETINGS)
def test_a_job_that_torchrun_restarts_meets_again(meeting, tmp_path):
    for number in range(int(os.environ.get("SPMDRL_RESTARTS", "1"))):
        done = run(meeting, tmp_path, str(number % 2))
        assert done.returncode == 0, f"repetition {number}: {done.stderr[-3000:]}"
        assert sorted(re.findall(r"sum (\d) (\S+) (\d)", done.stdout)) == [("0", "40.0", "1"), ("1", "40.0", "1")]
