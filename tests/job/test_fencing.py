"""One job writes into a run's folder: one that goes on without its lock ends, and has written nothing."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import time

import pytest
from tests.bench.faults.planned_faults import MODULE
from tests.support.jobs import environment, finished, job_command, metrics_of, run_job, tiny_config

from spmdrl.runtime.supervision.holder import LOCK_FILE

STEPS = ("train.max_steps=4", "checkpoint.interval=1", "checkpoint.keep_last=2")
SLOWLY = {"SPMDRL_FAULT": "generate:0:1:slow:0.3"}


def digests(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        # Empty is the file for stacks of a rank that runs.
        if path.is_file() and path.stat().st_size
    }


def started(config, folder, *, ranks):
    """A job that is stopped in the middle, its processes, and no lock any more: as on a node whose link is cut."""
    command = job_command("train", config, f"run.dir={folder}", *STEPS, ranks=ranks)
    job = subprocess.Popen(
        [MODULE if word == "spmdrl" else word for word in command],
        env=environment(**SLOWLY), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (folder / "checkpoints" / "step_000002").exists():
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    holder = json.loads((folder / LOCK_FILE).read_text())["pid"]
    pids = [holder] if ranks == 1 else children_of(job.pid)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    (folder / LOCK_FILE).unlink()
    return job, pids


def children_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_job_that_lost_its_folder_ends_and_has_written_nothing(tmp_path, ranks):
    config, folder = tiny_config(tmp_path), tmp_path / "run"
    job, pids = started(config, folder, ranks=ranks)
    try:
        finished(run_job("train", config, f"run.dir={folder}", *STEPS))
        before = digests(folder)
        assert [step["step"] for step in metrics_of(folder)] == [1, 2, 3, 4]
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        _, errors = job.communicate(timeout=120)
    finally:
        for pid in pids if job.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
    assert digests(folder) == before
    told = [line for line in errors.splitlines() if line.startswith(f"spmdrl: {folder} was taken by process ")]
    assert len(told) == 1, errors
    if ranks == 1:
        # Where there are more, torchrun ends with a code of its own and shows a page, with each rank's last line.
        assert job.returncode == 77 and "Traceback" not in errors
