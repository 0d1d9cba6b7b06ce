"""One job writes into a run's folder: one that goes on without its lock ends, and has written nothing."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path

import pytest
from tests.bench.faults.fault_jobs import FaultJobs, RunningJob
from tests.support.jobs import finished, metrics_of, run_job

from spmdrl.runtime.supervision.holder import LOCK_FILE

STEPS = ("train.max_steps=4", "checkpoint.interval=1", "checkpoint.keep_last=2")


def digests(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        # Empty is the file for stacks of a rank that runs.
        if path.is_file() and path.stat().st_size
    }


def started(jobs: FaultJobs, folder: Path) -> RunningJob:
    """A job that is stopped in the middle, and no lock any more: as on a node whose link is cut."""
    job = jobs.start(folder.name, fault="generate:0:1:slow:0.3")
    deadline = time.monotonic() + 120
    while not (folder / "checkpoints" / "step_000002").exists():
        assert all(rank.exitcode is None for rank in job.processes) and time.monotonic() < deadline, job.printed()
        time.sleep(0.02)
    for rank in job.processes:
        os.kill(rank.pid, signal.SIGSTOP)
    (folder / LOCK_FILE).unlink()
    return job


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_job_that_lost_its_folder_ends_and_has_written_nothing(tmp_path, ranks):
    jobs, folder = FaultJobs(tmp_path, ranks, *STEPS), tmp_path / "run"
    job = started(jobs, folder)
    try:
        finished(run_job(*jobs.command("run")))
        before = digests(folder)
        assert [step["step"] for step in metrics_of(folder)] == [1, 2, 3, 4]
        for rank in job.processes:
            os.kill(rank.pid, signal.SIGCONT)
        done = job.end()
    finally:
        for rank in job.processes:
            rank.kill()
    assert digests(folder) == before
    told = [line for line in done.screen.splitlines() if line.startswith(f"spmdrl: {folder} was taken by process ")]
    assert len(told) == 1 and "Traceback" not in done.screen, done.screen
    # The other rank ends with it.
    assert 77 in done.codes and all(done.codes)
