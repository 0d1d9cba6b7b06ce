"""The algorithm that docs/algorithms.md adds: a file beside the run, outside the package."""

from __future__ import annotations

import re
from pathlib import Path
from runpy import run_path

import pytest
from tests.support.jobs import ROOT, finished, metrics_of, run_job, tiny_config

from spmdrl.algorithms.table import build_algorithm
from spmdrl.config.config import load_config
from spmdrl.config.reader import ConfigError

PAGE = (ROOT / "docs/algorithms.md").read_text().partition("## Add an algorithm")[2]
ALGORITHM, TEST = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "gpg.py").write_text(ALGORITHM)
    (tmp_path / "test_gpg.py").write_text(TEST)
    return tmp_path


def chosen(spec: str, *overrides: str):
    return load_config(
        [], ["model.make={}", "data.train=synthetic://addition?count=10", f"algo.name={spec}", *overrides]
    )


@pytest.mark.ranks
def test_the_example_of_the_page_passes_its_test_and_trains(folder, monkeypatch):
    assert len(ALGORITHM.splitlines()) <= 40
    monkeypatch.syspath_prepend(folder)
    tests = {name: test for name, test in run_path(str(folder / "test_gpg.py")).items() if name.startswith("test_")}
    (test,) = tests.values()
    test()
    overrides = [f"run.dir={folder / 'run'}", f"algo.name={folder / 'gpg.py'}:Gpg", "algo.min_deviation=0.25"]
    trained = finished(run_job("train", tiny_config(folder), *overrides))
    assert "step 3/3" in trained.stdout, trained.stdout + trained.stderr
    assert "gpg.py:Gpg" in (folder / "run/config.resolved.yaml").read_text()
    steps = metrics_of(folder / "run")
    assert all(step["select/dropped_rows"] == step["select/alike"] == step["dock/dropped"] for step in steps)
    left_out = [step["select/alike"] for step in steps]
    assert all(rows % 4 == 0 for rows in left_out) and 0 < sum(left_out) < 3 * 32


def test_an_algorithm_in_a_file_has_its_own_keys_and_those_of_all(folder):
    spec = f"{folder / 'gpg.py'}:Gpg"
    loaded = chosen(spec, "algo.min_deviation=0.5", "algo.kl_coef=0.1")
    algo = loaded.value.algo
    assert (algo.name, algo.min_deviation, algo.kl_coef) == (spec, 0.5, 0.1)
    assert loaded.origin["algo.min_deviation"] == "command line" and loaded.origin["algo.entropy_coef"] == "default"
    built = build_algorithm(algo)
    assert type(built).__name__ == "Gpg" and built.config is algo and built.min_responses == 2


def test_its_mistyped_keys_and_values_are_refused_like_built_in_ones(folder):
    spec = f"{folder / 'gpg.py'}:Gpg"
    with pytest.raises(ConfigError, match=r"did you mean algo\.min_deviation\?"):
        chosen(spec, "algo.min_deviatoin=0.5")
    with pytest.raises(ConfigError, match=r"algo\.min_deviation is .*but must be a number"):
        chosen(spec, "algo.min_deviation=much")
    with pytest.raises(ConfigError, match=r"algo\.clip_ratio_low"):
        chosen(spec, "algo.clip_ratio_low=0.1")


@pytest.mark.parametrize(
    ("text", "name", "refusal"),
    [
        (None, "Own", "there is no file"),
        ("x = 1\n", "Own", "has no class 'Own'"),
        ("x = 1\nx.y\n", "Own", r"AttributeError.*own\.py:2"),
        ("class Own:\n    pass\n", "Own", "is no algorithm; derive it"),
        ("from spmdrl.algorithms.policy_gradient import Clipped as Own\n", "Own", "lacks advantages"),
        (
            "from spmdrl.algorithms.policy.grpo import Grpo\nfrom spmdrl.algorithms.settings.policy_configs import "
            "GrpoSettings\nclass Keys(GrpoSettings):\n    more: int = 1\nclass Own(Grpo):\n    config: Keys\n",
            "Own",
            "`config` of type Keys",
        ),
    ],
)
def test_what_is_no_algorithm_is_refused_by_name(tmp_path, text, name, refusal):
    path = tmp_path / "own.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=rf"(?s)^command line: algo\.name: .*{refusal}"):
        chosen(f"{path}:{name}")
