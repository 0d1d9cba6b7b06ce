"""`spmdrl check` looks at the machine, and each failed line names the remedy."""

from __future__ import annotations

import errno
import os
import platform
import resource
import shutil
import socket
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch
from tests.support.jobs import finished, run_job, tiny_config

from spmdrl.job.start import machine_check
from spmdrl.job.start.machine_check import CheckLine
from spmdrl.runtime.launch import read_launch_environment

SUBJECTS = ("versions", "devices", "ports", "disk", "shared memory", "open files")


def few_files() -> None:
    """Called in the job's process."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


@pytest.mark.ranks
def test_two_ranks_look_at_the_machine_and_time_their_link(tmp_path):
    job = finished(run_job("check", tiny_config(tmp_path), f"run.dir={tmp_path / 'run'}", "--all", ranks=2))
    for subject in SUBJECTS:
        assert job.stdout.count(f"ok     {subject}:") == 1, job.stdout
    assert "ok     all-reduce of 1 MiB over 2 ranks on 1 nodes:" in job.stdout and "FAILED" not in job.stdout
    assert f"Python {platform.python_version()}, torch " in job.stdout


def test_what_is_lacking_fails_with_its_remedy(tmp_path, monkeypatch):
    config = tiny_config(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        job = run_job("check", config, f"run.dir={tmp_path / 'run'}", prepare=few_files)
    assert job.returncode == 1, job.stdout + job.stderr
    assert "FAILED open files: at most 256, less than 1024; ulimit -n" in job.stdout
    assert "FAILED ports:" in job.stdout and "set MASTER_PORT to a free one" in job.stdout
    large = (
        "model.make={hidden_size: 524288, num_hidden_layers: 9, intermediate_size: 1048576, num_attention_heads: 64, "
        "num_key_value_heads: 64}"
    )
    job = run_job("check", config, f"run.dir={tmp_path / 'run'}", large, "checkpoint.interval=1")
    assert job.returncode == 1 and "FAILED disk:" in job.stdout and "checkpoint.model_only" in job.stdout
    assert not (tmp_path / "run").exists(), "one rank writes nothing"


def test_another_jobs_machine_is_not_looked_at(tmp_path):
    job = finished(run_job("check", tiny_config(tmp_path), "--ranks", "4"))
    assert "disk" not in job.stdout and "their devices weren't looked at" in job.stdout


def full(path: Path) -> object:
    return shutil._ntuple_diskusage(1 << 20, 1 << 20, 1000)


def taken(*arguments: object) -> None:
    raise OSError(errno.ENETUNREACH, "Network is unreachable")


def wrong(values: torch.Tensor) -> torch.Tensor:
    return values * 3


def slow(values: torch.Tensor) -> torch.Tensor:
    time.sleep(0.01)
    return values.clone()


ONE_RANK = read_launch_environment({})
# What to replace in the machine, what then looks at it, and the fault and the remedy that its line must have.
LACKING: dict[str, tuple[str, object, Callable[[], list[CheckLine]], str, str]] = {
    "old packages": (
        "metadata.version", lambda name: "0.1", lambda: list(machine_check._versions()),
        "torch 0.1, but spmdrl is made for", "pip install 'torch",
    ),
    "old Python": (
        "sys.version_info", (2, 7, 18), lambda: list(machine_check._versions()),
        "Python 2.7.18, but spmdrl needs", "make an environment of such a one",
    ),
    "no loopback": (
        "socket.create_server", taken, lambda: [machine_check._port(ONE_RANK)],
        "isn't available (Network is unreachable)", "look at the loopback interface",
    ),
    "no shared memory": (
        "Path.exists", lambda self: False, lambda: [machine_check._shared_memory()],
        "there is no /dev/shm", "mount a tmpfs there",
    ),
    "full shared memory": (
        "shutil.disk_usage", full, lambda: [machine_check._shared_memory()],
        "has 1000 B free, less than 64 MiB", "--shm-size",
    ),
    "a network that adds up wrongly": (
        "sum_over", wrong, lambda: [machine_check._all_reduce(ONE_RANK)], "its sum is wrong", "network's hardware",
    ),
    "a slow network": (
        "sum_over", slow, lambda: [machine_check._all_reduce(ONE_RANK)], "which is slow", "GLOO_SOCKET_IFNAME",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LACKING)
def test_each_failed_line_names_its_remedy(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, substitute, look, what, remedy = LACKING[case]
    # Read before its reader is replaced.
    assert metadata.metadata("spmdrl")["Requires-Python"]
    monkeypatch.setattr(f"spmdrl.job.start.machine_check.{name}", substitute)
    monkeypatch.setattr(machine_check, "_MOST_ROUND_SECONDS", 0.005)
    failed = [line.text for line in look() if not line.passed]
    assert failed, case
    assert any(what in text.split("; ", 1)[0] and remedy in text.split("; ", 1)[1] for text in failed), failed


def no_folder_for_writing() -> None:
    """Called in the job's process, which may be root's, who can write anywhere."""
    os.access = lambda path, mode: False


@pytest.mark.cpu_only(reason="other kinds of device are chosen for all jobs")
def test_a_missing_device_or_unwritable_folder_fails_with_its_remedy(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    job = run_job("check", config, f"run.dir={tmp_path / 'run'}", "resources.device=cuda")
    assert job.returncode != 0
    assert "PyTorch finds 'cpu' on this node" in (text := job.stdout + job.stderr), text
    assert "or set resources.device to auto" in text
    job = run_job("check", config, f"run.dir={tmp_path / 'run'}", prepare=no_folder_for_writing)
    assert job.returncode == 1
    assert f"FAILED disk: {tmp_path} can't be written to; set run.dir to a folder that can" in job.stdout, job.stdout
