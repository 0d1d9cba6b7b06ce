"""The doctor on the simulated device, as its users start it: what it starts finds the device by itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import simulated_accelerator
from tests.support.jobs import ROOT, environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(reason := simulated_accelerator.why_not()), reason=str(reason)),
    pytest.mark.cpu_only(reason="these tests choose their device"),
]


def check(*arguments: str, on: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """What the check writes with `--json`."""
    path = folder / "check.json"
    check = ["spmdrl", "doctor", "--small", "--json", str(path), "--folder", str(folder / "check")]
    command = [sys.executable, "-m", "tests.support.simulated_accelerator", *on, *check, *arguments]
    subprocess.run(command, env=environment(), cwd=ROOT, timeout=600, check=True, capture_output=True)
    return json.loads(path.read_text())


def test_the_stage_of_whole_jobs_passes(tmp_path):
    found = check("quickstart", "--nproc", "1", on=(), folder=tmp_path)
    assert found["device"]["kind"] == "sim"
    [stage] = found["stages"]
    assert (stage["verdict"], stage["reason"]) == ("passed", "")
    assert stage["figures"]["last_reward"] > stage["figures"]["first_reward"]


def test_ranks_find_it_as_an_npu_of_the_given_size(tmp_path):
    found = check("device", "--nproc", "2", on=("--name", "npu", "--memory-bytes", str(2 << 30)), folder=tmp_path)
    assert found["device"].items() >= {"kind": "npu", "count": 8, "memory_gib": 2.0}.items()
    [stage] = found["stages"]
    assert stage["verdict"] == "passed", stage["reason"]
    assert stage["figures"]["all_reduce_gb_per_second"] > 0
