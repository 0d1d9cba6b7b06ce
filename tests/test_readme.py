"""What README and messages promise, compared with what is there and what can be installed."""

from __future__ import annotations

import re
from configparser import ConfigParser
from pathlib import Path

from spmdrl.cli.command_line import VERBS
from spmdrl.config.config import load_config

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
INSTALL = re.compile(r"pip install (?!-qq|--)[^`#\n]*")


def install_lines() -> list[tuple[Path, str]]:
    files = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    files += [path for folder in ("src", "launch", "configs") for path in (ROOT / folder).rglob("*") if path.is_file()]
    read = [path for path in files if path.suffix in (".md", ".yaml", ".py", ".sh")]
    return [(path, line) for path in read for line in INSTALL.findall(path.read_text(errors="replace"))]


def test_no_line_installs_this_project_from_an_index_that_does_not_have_it() -> None:
    assert install_lines()
    strangers = [f"{path}: {line}" for path, line in install_lines() if re.search(r"\bspmdrl\b", line)]
    assert not strangers, "the name isn't registered, and whoever registers it would be installed"


def test_every_extra_that_a_line_installs_is_there() -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = set(setup["options.extras_require"])
    named = {
        extra
        for _, line in install_lines()
        for group in re.findall(r"'?\.\[([\w,-]+)\]", line)
        for extra in group.split(",")
    }
    assert named and named <= extras


def test_readmes_verbs_files_and_pages_are_there() -> None:
    verbs = re.findall(r"-m spmdrl (\w+)", README)
    assert len(verbs) > 5 and set(verbs) <= {*VERBS, "help"}
    files = re.findall(r"\b(?:launch|configs|docs)/[\w/.-]+\.\w+", README)
    assert len(files) > 10 and not [name for name in files if not (ROOT / name).is_file()]


def test_every_page_of_the_documentation_is_in_readmes_table() -> None:
    assert not [path.name for path in ROOT.glob("docs/*.md") if f"(docs/{path.name})" not in README]


def test_readmes_config_is_read(tmp_path: Path) -> None:
    [text] = re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)
    (tmp_path / "run.yaml").write_text(text)
    assert load_config([tmp_path / "run.yaml"], []).value.run.name == "my_run"
