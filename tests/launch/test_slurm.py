"""A run on a real Slurm of two nodes on this machine: bash launch/test_slurm.sh installs it and runs these."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.jobs import ROOT, finished, tiny_config, weights_digest
from tests.support.slurm import Slurm, slurm, why_not

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.skipif(why_not() is not None, reason=f"{why_not()}"),
]

STEPS = 16
SCRIPT = ROOT / "src/spmdrl/verbs/launching/slurm.sbatch"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    with slurm() as started:
        yield started


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return slow_config(tmp_path_factory.mktemp("slurm"))


def slow_config(folder: Path) -> Path:
    """A run whose steps take some tenths of a second, as each response is scored by itself."""
    path = tiny_config(folder)
    reward = folder / "reward.py"
    reward.write_text("import time\n" + reward.read_text().replace("    return", "    time.sleep(0.02)\n    return"))
    path.write_text(path.read_text().replace("checkpoint: {interval: 0}", "checkpoint: {interval: 2, keep_last: 4}"))
    return path


@pytest.fixture(scope="module")
def uninterrupted(cluster: Slurm, config: Path) -> str:
    """The weights of the run that nothing disturbs, its ranks plain tasks of srun."""
    command = ["srun", "--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--cpus-per-task=2"]
    program = [sys.executable, "-m", "spmdrl", *words(config, config.parent / "undisturbed")]
    done = subprocess.run(
        [*command, *program], env=cluster.environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert "ranks  2 ranks on 2 nodes" in finished(done).stdout
    return weights_digest(config.parent / "undisturbed", STEPS)


def words(config: Path, folder: Path) -> list[str]:
    return ["train", str(config), f"run.dir={folder}", f"train.max_steps={STEPS}"]


def submit(cluster: Slurm, config: Path, folder: Path, *options: str) -> int:
    """Submit the plain script for two nodes of one rank each."""
    settings = {"RANKS_PER_NODE": "1", "PYTHON": sys.executable, "SCRATCH": str(config.parent)}
    return cluster.submit("--nodes=2", *options, SCRIPT, *words(config, folder), cwd=config.parent, **settings)


def wait_for_checkpoint(folder: Path, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not list(folder.glob("checkpoints/step_*")):
        assert time.monotonic() < deadline, folder
        time.sleep(0.1)


def assert_no_process_is_left(cluster: Slurm) -> None:
    deadline = time.monotonic() + 15
    while left := cluster.processes():
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def log_of(config: Path, job: int) -> str:
    [log] = config.parent.glob(f"*-{job}.log")
    return log.read_text()


def test_a_preempted_run_is_requeued_and_ends_with_the_same_weights(cluster, config, uninterrupted):
    folder = config.parent / "preempted"
    job = submit(cluster, config, folder)
    wait_for_checkpoint(folder)
    high = cluster.submit("--partition=high", "--nodes=2", "--exclusive", "--wrap=sleep 1", cwd=config.parent)
    cluster.wait_for(high, "COMPLETED")
    ended = cluster.wait_for(job, "COMPLETED", "FAILED")
    log = log_of(config, job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), log[-3000:]
    assert "DUE TO PREEMPTION" in log and f"job {job}, start 2" in log and "resumed from" in log
    assert weights_digest(folder, STEPS) == uninterrupted
    assert_no_process_is_left(cluster)
    assert not list(config.parent.glob(f"spmdrl-*-{job}-*")), "its scratch folder"


def test_a_run_whose_time_limit_comes_near_saves_and_is_requeued(cluster, config, uninterrupted):
    folder = config.parent / "limited"
    job = submit(cluster, config, folder)
    wait_for_checkpoint(folder)
    # What --signal=B:USR1@300 does then.
    cluster.command("scancel", "--batch", "--signal=USR1", job)
    ended = cluster.wait_for(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    log = log_of(config, job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), log[-3000:]
    assert "stopped and saved; requeued" in log and "resumed from" in log
    assert weights_digest(folder, STEPS) == uninterrupted


def test_a_run_that_loses_a_node_is_requeued_and_ends_with_the_same_weights(cluster, config, uninterrupted):
    folder = config.parent / "lost"
    job = submit(cluster, config, folder)
    wait_for_checkpoint(folder)
    with cluster.without("n2"):
        deadline = time.monotonic() + 120
        while cluster.job(job)["Restarts"] == "0":
            assert time.monotonic() < deadline, log_of(config, job)[-3000:]
            time.sleep(0.5)
    ended = cluster.wait_for(job, "COMPLETED", "FAILED", "CANCELLED")
    log = log_of(config, job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), log[-3000:]
    assert "DUE TO NODE FAILURE" in log and "resumed from" in log
    assert weights_digest(folder, STEPS) == uninterrupted
    assert_no_process_is_left(cluster)


def test_a_cancelled_run_leaves_no_process_and_is_not_requeued(cluster, config):
    folder = config.parent / "cancelled"
    job = submit(cluster, config, folder)
    wait_for_checkpoint(folder)
    cluster.command("scancel", str(job))
    ended = cluster.wait_for(job, "CANCELLED")
    assert ended["Restarts"] == "0"
    assert_no_process_is_left(cluster)


def test_a_run_that_its_time_limit_ends_has_saved_before_and_is_requeued_by_its_exit_code(
    cluster, uninterrupted, tmp_path
):
    config = slow_config(tmp_path)
    reward = config.with_name("reward.py")
    # Until it may go on, it takes longer than the limit.
    patient = "time.sleep(0.02 if (pathlib.Path(__file__).parent / 'fast').exists() else 0.8)"
    reward.write_text("import pathlib\n" + reward.read_text().replace("time.sleep(0.02)", patient))
    # A batch script of one line, which knows nothing of requeues: RequeueExit does it.
    program = shlex.join([sys.executable, "-m", "spmdrl", *words(config, tmp_path / "run")])
    options = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2", "--time=1", "--open-mode=append")
    step = f"--wrap=srun --cpus-per-task=2 --kill-on-bad-exit=1 {program}"
    job = cluster.submit(*options, "--output=limited.log", step, cwd=tmp_path)
    log = tmp_path / "limited.log"
    deadline = time.monotonic() + 150
    while (record := cluster.job(job))["Restarts"] == "0":
        assert record["JobState"] not in ("TIMEOUT", "FAILED"), log.read_text()[-3000:]
        assert time.monotonic() < deadline, record["JobState"]
        time.sleep(0.3)
    (tmp_path / "fast").touch()
    ended = cluster.wait_for(job, "COMPLETED", "FAILED", "TIMEOUT")
    assert ended["JobState"] == "COMPLETED", log.read_text()[-3000:]
    assert "stopped by Slurm's time limit" in log.read_text() and "resumed from" in log.read_text()
    assert weights_digest(tmp_path / "run", STEPS) == uninterrupted


def test_tasks_of_different_nodes_in_unequal_numbers_are_refused(cluster, config):
    command = ["srun", "--nodes=2", "--ntasks=3", sys.executable, "-m", "spmdrl"]
    command += words(config, config.parent / "none")
    done = subprocess.run(command, env=cluster.environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "use --ntasks-per-node=N without --ntasks" in done.stderr
