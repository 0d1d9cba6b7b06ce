"""`spmdrl check` looks at the machine, and each failed line names the remedy."""

from __future__ import annotations

import platform
import resource
import socket

import pytest
from tests.support.jobs import finished, run_job, tiny_config

SUBJECTS = ("versions", "devices", "ports", "disk", "shared memory", "open files")


def few_files() -> None:
    """Called in the job's process."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


@pytest.mark.ranks
def test_two_ranks_look_at_the_machine_and_time_their_link(tmp_path):
    job = finished(run_job("check", tiny_config(tmp_path), f"run.dir={tmp_path / 'run'}", ranks=2))
    for subject in SUBJECTS:
        assert job.stdout.count(f"# ok     {subject}:") == 1, job.stdout
    assert "# ok     all-reduce of 1 MiB over 2 ranks on 1 nodes:" in job.stdout and "FAILED" not in job.stdout
    assert f"Python {platform.python_version()}, torch " in job.stdout


def test_what_is_lacking_fails_with_its_remedy(tmp_path, monkeypatch):
    config = tiny_config(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        job = run_job("check", config, f"run.dir={tmp_path / 'run'}", prepare=few_files)
    assert job.returncode == 1, job.stdout + job.stderr
    assert "# FAILED open files: at most 256, less than 1024; ulimit -n" in job.stdout
    assert "# FAILED ports:" in job.stdout and "set MASTER_PORT to a free one" in job.stdout
    large = (
        "model.make={hidden_size: 65536, num_layers: 400, intermediate_size: 262144, num_heads: 64, num_kv_heads: 64}"
    )
    job = run_job("check", config, f"run.dir={tmp_path / 'run'}", large, "checkpoint.interval=1")
    assert job.returncode == 1 and "# FAILED disk:" in job.stdout and "checkpoint.model_only" in job.stdout
    assert not (tmp_path / "run").exists(), "one rank writes nothing"


def test_another_jobs_machine_is_not_looked_at(tmp_path):
    job = finished(run_job("check", tiny_config(tmp_path), "--ranks", "4"))
    assert "# ok" not in job.stdout and "their devices weren't looked at" in job.stdout
