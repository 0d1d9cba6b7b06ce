"""The package as it is installed: its metadata, the files beside it, and messages that hold without the clone."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

import spmdrl
from spmdrl.runtime.installed import how_to_install, located
from tests.support.jobs import ROOT, environment

SOURCES = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]


@pytest.fixture(scope="module")
def setup() -> ConfigParser:
    read = ConfigParser()
    read.read(ROOT / "setup.cfg")
    return read


def test_each_extra_that_a_message_installs_is_there(setup: ConfigParser) -> None:
    named = {name for text in SOURCES for name in re.findall(r"how_to_install\(['\"]([\w-]+)", text)}
    assert {"math", "vllm"} <= named <= set(setup["options.extras_require"])
    assert how_to_install("math") == "`pip install -e '.[math]'` in the clone"


def test_without_the_clone_a_message_names_the_packages_themselves(tmp_path: Path) -> None:
    assert how_to_install("wandb", clone=tmp_path) == "`pip install 'wandb>=0.18'`"
    assert "'vllm>=" in how_to_install("vllm", clone=tmp_path)


def test_each_file_that_a_message_or_a_page_of_help_names_is_in_the_wheel(setup: ConfigParser) -> None:
    shipped = {
        str(path.relative_to(ROOT))
        for patterns in setup["options.data_files"].values()
        for pattern in re.split(r"[,\s]+", patterns)
        for path in ROOT.glob(pattern)
    }
    named = {name for text in SOURCES for name in re.findall(r"\b(?:docs|configs)/[\w/]+\.(?:md|json|yaml)", text)}
    assert len(named) > 8 and named <= shipped
    assert located("see docs/rewards.md") == "see docs/rewards.md"


@pytest.mark.parametrize(
    ("platform", "imported_before", "words"),
    [
        ("win32", "sys", "needs Linux; on Windows run it in WSL 2"),
        # Python's own modules look for macOS's files.
        ("darwin", "spmdrl.config.config, zoneinfo", "macOS isn't tested: several nodes and the reward"),
    ],
)
def test_other_systems_get_a_line_in_place_of_an_import_error(platform: str, imported_before: str, words: str) -> None:
    code = f"import sys, {imported_before}; sys.platform = {platform!r}; from spmdrl.cli.command_line import main; "
    command = [sys.executable, "-c", f"{code}sys.exit(main(sys.argv[1:]))", "train", "optim.lrr=1"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_versions_agree_and_the_changes_have_this_one() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == spmdrl.__version__
    assert f"\n## {spmdrl.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_page_of_the_index_has_no_link_that_only_a_clone_resolves() -> None:
    text = (ROOT / "docs" / "package.md").read_text(encoding="utf-8")
    assert not [link for link in re.findall(r"\]\(([^)]*)\)", text) if "://" not in link]


def test_workflows_and_templates_are_valid_and_name_files_that_are_there() -> None:
    files = sorted((ROOT / ".github").rglob("*.y*ml"))
    assert len(files) > 4
    for path in files:
        assert yaml.safe_load(path.read_text(encoding="utf-8")), path
        named = re.findall(r"(?:bash |-f )((?:launch|\.ci)/[\w/.]+)", path.read_text(encoding="utf-8"))
        assert not [name for name in named if not (ROOT / name).exists()], path
    for path in (ROOT / "launch" / "docker").iterdir():
        copied = re.findall(r"^COPY (.+) \S+$", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert copied and not [one for line in copied for one in line.split() if not (ROOT / one).exists()], path


@pytest.mark.slow
def test_an_installed_wheel_names_files_that_are_there(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "LICENSE", "src", "docs", "configs"):
        subprocess.run(["cp", "-r", ROOT / name, clone / name], check=True)
    build = "import setuptools.build_meta as back_end, sys; print(back_end.build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", build, tmp_path], cwd=clone, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as inside:
        names = inside.namelist()
        metadata = inside.read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert "spmdrl/py.typed" in names and "License-Expression: Apache-2.0" in metadata
    assert any(name.endswith("share/spmdrl/docs/config.schema.json") for name in names)
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--no-compile", wheel]
    subprocess.run(pip, check=True, capture_output=True)
    # What it needs, but not the clone that the same folder points to.
    env = environment(PYTHONPATH=sysconfig.get_path("purelib"))

    def spmdrl(*words: str) -> subprocess.CompletedProcess[str]:
        command = [python, "-m", "spmdrl", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env, check=False)

    told = spmdrl("train")
    [named] = re.findall(r"such as the run.yaml of spmdrl (init \w+)", told.stderr)
    assert told.returncode == 2 and spmdrl(*named.split()).returncode == 0
    checked = spmdrl("check", "run.yaml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
