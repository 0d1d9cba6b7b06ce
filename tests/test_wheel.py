"""From a wheel, without the clone and without a compiler: init, train, report and generate in four commands."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.jobs import ROOT

pytestmark = pytest.mark.slow


def run(*words: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    # The system's own programs without g++ and its like; the environment brings PyTorch.
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    for name in ("sh", "uname"):
        link = tools / name
        if not link.exists():
            link.symlink_to(f"/bin/{name}")
    environment = {
        **os.environ,
        "PATH": str(tools),
        "PYTHONPATH": str(folder / "site"),
        "OMP_NUM_THREADS": "1",
    } | variables
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel unpacked in `site`."""
    folder = tmp_path_factory.mktemp("wheel")
    # Not from the tree itself: two workers that build there at once remove each other's files.
    clone = folder / "clone"
    clone.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "LICENSE", "src", "docs", "configs"):
        subprocess.run(["cp", "-r", ROOT / name, clone / name], check=True)
    words = ["-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(folder), str(clone)]
    subprocess.run([sys.executable, *words], check=True, timeout=600)
    (wheel,) = folder.glob("spmdrl-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        packed.extractall(folder / "site")
    assert "spmdrl/cli/first_files/quickstart.yaml" in names and not [
        name for name in names if name.startswith("tests")
    ]
    return folder


def test_four_commands_from_a_wheel(installed: Path) -> None:
    few = ["sft.max_steps=20", "sft.stop_at_probability=null", "train.max_steps=3", "data.eval=null"]
    for words in (
        ["init", "quickstart"],
        ["train", "run.yaml", *few, "run.dir=runs/first", "resources.device=cpu"],
        ["report", "runs/first"],
        ["generate", "model.path=runs/first", "prompt=3+4=", "resources.device=cpu"],
    ):
        done = run("-m", "spmdrl", *words, folder=installed)
        assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-2000:])
    assert done.stdout.startswith("> 3+4=\n")
    assert (installed / "runs" / "first" / "report.html").stat().st_size > 10_000


def test_every_start_of_a_wheel_is_written(installed: Path) -> None:
    for name in ("smollm2", "gsm8k", "dpo", "environment"):
        done = run("-m", "spmdrl", "init", name, "--to", name, folder=installed)
        assert done.returncode == 0 and (installed / name / "run.yaml").is_file(), done.stderr
