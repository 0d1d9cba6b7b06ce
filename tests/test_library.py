"""spmdrl from Python: a run, its rows and its answers in a few lines, and nothing imported before it is used."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from decimal import Decimal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import spmdrl
from spmdrl.config.reader import ConfigError
from spmdrl.library import _words

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "docs" / "examples"
FEW = {
    "model": {"make": {"hidden_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 64}},
    "data.train": "synthetic://addition?low=0&high=49",
    "rollout": {"prompts_per_step": 4, "num_generations": 2, "max_completion_length": 3},
    "resources.device": "cpu",
}


def run_python(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment_in(folder), capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip


def environment_in(folder: Path) -> dict[str, str]:
    """An environment in which copies of functions stay below the folder."""
    cache = {"XDG_CACHE_HOME": str(folder / "cache")}
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **cache}


class Scale:
    """A callable object whose text could be a name."""

    def __call__(self, completions, **columns):
        return [0.0 for _ in completions]

    def __repr__(self) -> str:
        return "Scale(0)"


def longer(completions, **columns):
    return [float(len(text) > 1) for text in completions]


def test_a_run_by_a_call_is_read_as_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    run = spmdrl.train(
        FEW, reward={"functions": [longer]}, train={"max_steps": 2}, run={"dir": folder}, learning_rate=1e-3
    )
    assert [step["step"] for step in run.metrics] == [1, 2] and run.metrics[0]["lr"] == 1e-3
    assert {"prompt", "response", "reward"} <= set(run.samples[0])
    assert spmdrl.read_run(folder).summary == run.summary and run.model.name == "model"
    with spmdrl.Policy.load(folder, **{"rollout.max_completion_length": 2, "resources.device": "cpu"}) as policy:
        first, again = policy.generate(["1+2=", "3+4="]), policy.generate(["3+4="])
        assert len(first) == 2 and again == first[1:]
    limits = {"rollout.max_completion_length": 2, "resources.device": "cpu"}
    assert spmdrl.generate(["3+4="], limits, model={"path": folder}) == again
    sums = {"data.eval": "synthetic://addition?low=0&high=49&count=5&split=test", "reward.functions": ["exact"]}
    found = spmdrl.evaluate(sums, model={"path": folder}, run={"dir": tmp_path / "eval"}, resources={"device": "cpu"})
    assert found["num_prompts"] == 5 and 0 <= found["accuracy"] <= 1
    capsys.readouterr()


def test_wrong_input_is_a_value_error_with_all_faults(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"2 faults[\s\S]*seed is[\s\S]*lerning_rate"):
        spmdrl.train(FEW, lerning_rate=1, seed="x")
    with pytest.raises(ValueError, match="is no run's folder"):
        spmdrl.read_run(tmp_path)
    with pytest.raises(ValueError, match="has no name of its own"):
        spmdrl.train(FEW, reward={"functions": [lambda completion, **columns: 0.0]})
    for unnamed in (Scale(), partial(longer, limit=2)):
        with pytest.raises(ValueError, match="(Scale|longer).* has no name of its own"):
            spmdrl.train(FEW, reward={"functions": [unnamed]})
    with pytest.raises(ValueError, match=r"optim.lr is Decimal\('1'\), but must be text, a number"):
        spmdrl.train(FEW, optim={"lr": Decimal(1)})
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        spmdrl.trian  # noqa: B018


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    given = {"lr": np.float64(1e-6), "betas": (np.float32(0.5), torch.tensor(0.25)), "rows": [{"n": np.int64(3)}]}
    words = list(_words({"optim": given, "weights": np.array([1, 2]), "eval": {}}))
    assert words == ["optim.lr=1.0e-06", "optim.betas=[0.5, 0.25]", "optim.rows=[{n: 3}]", "weights=[1, 2]", "eval={}"]


def test_a_function_without_a_text_is_refused(tmp_path: Path) -> None:
    code = "import spmdrl\ndef score(completions): return []\nspmdrl.train(reward={'functions': [score]})"
    done = run_python("-c", code, folder=tmp_path)
    assert "ValueError: score can't be copied (" in done.stderr and "rewards.py:score" in done.stderr


def test_import_takes_no_torch_and_little_time(tmp_path: Path) -> None:
    code = "import resource, sys, spmdrl; print('torch' in sys.modules, 'yaml' in sys.modules)"
    done = run_python("-c", code, folder=tmp_path)
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_the_script_of_twelve_lines_runs(tmp_path: Path) -> None:
    text = (EXAMPLES / "grpo_in_12_lines.py").read_text()
    assert len([line for line in text.splitlines() if line.strip()]) <= 14
    done = run_python(str(EXAMPLES / "grpo_in_12_lines.py"), folder=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout.splitlines()[-1].split()[0]) >= 0
    # Beside it lies Python's own __pycache__, unless the environment forbids that.
    [copy] = (tmp_path / "cache" / "spmdrl" / "functions").glob("*.py")
    assert "\n\n\ndef score(" in copy.read_text() and copy.parent.stat().st_mode & 0o077 == 0


TYPED = """
import re
from typing import List
from spmdrl.library import _spec

SCALE = 2.0
def marked(function):
    return function

def by_default(completions, scale=SCALE):
    return [scale for _ in completions]
@marked
def decorated(completions):
    return [1.0 for _ in completions]
def by_a_loop(completions):
    return [float(bool(re.search("1", text))) for text in completions]
def score(completions: List[str], unused: re.Pattern = None) -> List[float]:
    import math
    return [math.fsum(len(part) for part in text.split()) for text in completions]

for one in (by_default, decorated, by_a_loop, score):
    try:
        print(_spec(one))
    except ValueError as error:
        print(str(error).partition(" from ")[0])
"""


def test_a_typed_function_is_copied_only_if_the_copy_has_all_that_it_needs(tmp_path: Path) -> None:
    (tmp_path / "typed.py").write_text(TYPED)
    done = run_python("typed.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    *refused, spec = done.stdout.splitlines()
    assert refused == ["by_default uses SCALE", "decorated uses marked", "by_a_loop uses re"]
    path, _, name = spec.rpartition(":")
    assert runpy.run_path(path)[name](["a bc", ""]) == [3.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo_in_a_notebook", "reading_runs"])
def test_notebooks_run_from_top_to_bottom(name: str, tmp_path: Path) -> None:
    cells = json.loads((EXAMPLES / f"{name}.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert code and all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code")
    # As a kernel runs cells: in one namespace, each text known to inspect.
    driver = tmp_path / "driver.py"
    driver.write_text(
        "import json, linecache, sys\n"
        "del globals()['__file__']\n"
        "for number, text in enumerate(json.load(sys.stdin)):\n"
        "    name = f'<cell {number}>'\n"
        "    linecache.cache[name] = (len(text), None, text.splitlines(True), name)\n"
        "    exec(compile(text, name, 'exec'), globals())\n"
    )
    done = subprocess.run(
        [sys.executable, str(driver)], input=json.dumps(code), cwd=tmp_path, env=environment_in(tmp_path),
        capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
