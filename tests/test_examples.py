"""The examples of the documentation run, and do what they say."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from spmdrl.engines.models.make_model import make_model_folder
from spmdrl.nouns.settings.model_config import MakeConfig
from spmdrl.resources.world import open_world
from tests.support.jobs import ROOT

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
