"""The algorithm that docs/algorithms.md adds, in a copy of the source: with the four files that the page names."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.jobs import ROOT, environment, metrics_of, tiny_config

PAGE = (ROOT / "docs/algorithms.md").read_text().partition("## Add an algorithm")[2]

IMPORT = "from spmdrl.algorithms.policy.gpg import Gpg, GpgConfig\n"


def with_the_pages_files(folder: Path) -> Path:
    """The copy's source folder; YAML and test lie beside it."""
    algorithm, line, test = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    [config] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    source = folder / "src"
    shutil.copytree(ROOT / "src/spmdrl", source / "spmdrl", ignore=shutil.ignore_patterns("__pycache__"))
    algorithms = source / "spmdrl/algorithms"
    (algorithms / "policy/gpg.py").write_text(algorithm)
    table = algorithms / "table.py"
    lines = table.read_text().splitlines(keepends=True)
    lines.insert(lines.index("    GrpoConfig: Grpo,\n"), line)
    lines.insert(lines.index("from spmdrl.algorithms.policy.grpo import Grpo\n"), IMPORT)
    table.write_text("".join(lines))
    choices = algorithms / "settings/choices.py"
    start = "ALGO_CONFIGS: tuple[type[AlgoConfig], ...] = (\n"
    choices.write_text(choices.read_text().replace(start, f"{IMPORT}{start}    GpgConfig,\n"))
    (folder / "gpg.yaml").write_text(config)
    (folder / "test_gpg.py").write_text(test)
    return source


def run(source: Path, *command: str) -> str:
    """What a Python module prints that runs on the copy."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=source.parent, env=environment(PYTHONPATH=str(source)),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.ranks
def test_the_example_of_the_page_passes_its_test_and_trains(tmp_path):
    source = with_the_pages_files(tmp_path)
    assert "1 passed" in run(source, "pytest", "-q", "test_gpg.py")
    overrides = [f"run.dir={tmp_path / 'run'}", "algo.min_deviation=0.25"]
    told = run(source, "spmdrl", "train", str(tiny_config(tmp_path)), "gpg.yaml", *overrides)
    assert "gpg step 3/3" in told
    steps = metrics_of(tmp_path / "run")
    assert all(step["select/dropped_rows"] == step["select/alike"] == step["dock/dropped"] for step in steps)
    left_out = [step["select/alike"] for step in steps]
    assert all(rows % 4 == 0 for rows in left_out) and 0 < sum(left_out) < 3 * 32
