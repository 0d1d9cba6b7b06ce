"""Runs under MindSpore's msrun: bash launch/test_msrun.sh installs it beside spmdrl's environment and runs these."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.jobs import ROOT, environment, finished, launch_job, tiny_config, weights_digest

MSRUN = shutil.which(os.environ.get("MSRUN", "msrun"))

pytestmark = [
    pytest.mark.msrun,
    pytest.mark.slow,
    pytest.mark.skipif(MSRUN is None, reason="there is no msrun: bash launch/test_msrun.sh"),
]


def script(folder: Path, *words: str | Path) -> tuple[list[str], dict[str, str]]:
    """The command of msrun.sh with two workers, and its environment."""
    settings = {"RANKS_PER_NODE": "2", "MSRUN": str(MSRUN), "PYTHON": sys.executable, "LOGS": str(folder / "logs")}
    return ["bash", str(ROOT / "src/spmdrl/verbs/launching/msrun.sh"), *map(str, words)], environment(**settings)


def test_a_run_with_two_workers_ends_with_the_weights_that_torchrun_gives(tmp_path):
    config = tiny_config(tmp_path)
    command, environ = script(tmp_path, "train", config, f"run.dir={tmp_path / 'msrun'}")
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert "ranks  2 ranks on 1 node" in finished(done).stdout
    finished(launch_job("train", config, f"run.dir={tmp_path / 'torchrun'}", ranks=2))
    assert weights_digest(tmp_path / "msrun", 3) == weights_digest(tmp_path / "torchrun", 3)


def test_wrong_input_ends_the_script_as_it_ends_the_ranks(tmp_path):
    command, environ = script(tmp_path, "train", tiny_config(tmp_path), "optim.lr=-1", f"run.dir={tmp_path / 'none'}")
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and done.stdout.count("spmdrl: ") == 1, done.stdout + done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_script_reaches_the_workers_and_nothing_is_left(tmp_path, number):
    folder = tmp_path / "run"
    settings = ["train.max_steps=1000", "checkpoint.interval=1", f"run.dir={folder}"]
    command, environ = script(tmp_path, "train", tiny_config(tmp_path), *settings)
    output = open(tmp_path / "output", "wb")  # noqa: SIM115 closed with this process
    # A job in the background of a shell ignores SIGINT, and so would all that it starts.
    command = ["env", "--default-signal=INT", *command]
    started = subprocess.Popen(command, env=environ, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not list(folder.glob("checkpoints/step_*")):
            assert time.monotonic() < deadline and started.poll() is None, (tmp_path / "output").read_text()
            time.sleep(0.1)
        started.send_signal(number)
        code = started.wait(timeout=60)
    finally:
        started.kill()
    assert code in {signal.SIGTERM: (143, 75), signal.SIGINT: (130,)}[number]
    time.sleep(1)
    assert not [pid for pid in Path("/proc").glob("[0-9]*") if str(folder).encode() in command_of(pid)]


def command_of(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""
