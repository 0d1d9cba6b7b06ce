"""The examples of the documentation run, and do what they say."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from spmdrl.engines.models.make_model import make_model_folder
from spmdrl.nouns.settings.model_config import MakeConfig
from spmdrl.resources.world import open_world
from tests.support.jobs import ROOT, environment

MINIMAL = ROOT / "docs" / "examples" / "minimal_grpo.py"


def test_the_minimal_loop_learns_and_stays_minimal(tmp_path):
    assert len(MINIMAL.read_text().splitlines()) <= 200
    example = runpy.run_path(str(MINIMAL))
    make_model_folder(
        tmp_path / "model", MakeConfig(hidden_size=64, num_hidden_layers=2, max_position_embeddings=64), seed=0
    )
    with open_world("cpu") as world:
        policy = example["load_policy"](tmp_path / "model", world, num_steps=30, lr=2e-3)
        curve = example["train"](policy, example["share_of_digits"], num_steps=30)
    assert curve[0] < 0.2 and curve[-1] > 0.6


@pytest.mark.parametrize("page", ["library.md"])
def test_the_python_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    assert blocks
    script = Path("page.py")
    script.write_text("\n".join(blocks))
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.slow
def test_the_task_of_20_lines_is_trained_as_the_page_has_it(tmp_path):
    blocks = re.findall(
        r"```(?:python|yaml)\n(# (\S+)\n.*?)```", (ROOT / "docs" / "your_task.md").read_text(), re.DOTALL
    )
    for text, name in blocks:
        (tmp_path / name).write_text(text)
    subprocess.run([sys.executable, "make_rows.py"], cwd=tmp_path, check=True)
    short = ("train.max_steps=2", "sft.max_steps=8", "eval.max_rows=16")
    for arguments in (["check", "run.yaml", "--reward"], ["train", "run.yaml", *short]):
        command = [sys.executable, "-m", "spmdrl", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "FAILED" not in done.stdout, done.stdout + done.stderr
    assert "grpo done: 2 steps" in done.stdout
