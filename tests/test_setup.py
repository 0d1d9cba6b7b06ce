"""The scripts that set up the environment show on a terminal that they go on, and are quiet in a log."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.jobs import ROOT

INSTALL = f"source {ROOT}/launch/environment.sh; set -euo pipefail; pip_install something; say after"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder whose pip takes its time, PIP_SECONDS, and ends with PIP_STATUS."""
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nsleep "$PIP_SECONDS"; exit "$PIP_STATUS"\n')
    python.chmod(0o755)
    return tmp_path


def _on_terminal(folder: Path, **variables: str) -> tuple[int, str]:
    leader, follower = os.openpty()
    job = subprocess.Popen(
        ["bash", "-c", INSTALL], stdout=follower, stderr=follower, cwd=folder, env=os.environ | variables
    )
    os.close(follower)
    shown = b""
    try:
        while part := os.read(leader, 4096):
            shown += part
    except OSError:
        # Linux's end of a terminal.
        pass
    finally:
        os.close(leader)
    return job.wait(timeout=20), shown.decode()


def test_on_a_terminal_a_long_installation_counts_its_seconds(clone: Path):
    code, shown = _on_terminal(clone, PIP_SECONDS="2.6", PIP_STATUS="0")
    assert code == 0 and "[setup] ... 2 s, " in shown and "[setup] after" in shown


def test_a_failed_installation_fails_the_script_also_on_a_terminal(clone: Path):
    code, shown = _on_terminal(clone, PIP_SECONDS="0", PIP_STATUS="7")
    assert code == 7 and "after" not in shown


def test_a_log_gets_no_progress(clone: Path):
    env = os.environ | {"PIP_SECONDS": "2.2", "PIP_STATUS": "0"}
    job = subprocess.run(["bash", "-c", INSTALL], capture_output=True, text=True, cwd=clone, env=env, check=True)
    assert job.stdout == "[setup] after\n" and job.stderr == ""
