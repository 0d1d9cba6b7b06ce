"""What is said about installing, held against what can be installed."""

from __future__ import annotations

import re
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).parents[1]
INSTALL = re.compile(r"pip install (?!-qq|--)[^`\n]*")


def install_lines() -> list[tuple[Path, str]]:
    files = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("configs/**/*.yaml")]
    files += [path for folder in ("src", "launch") for path in (ROOT / folder).rglob("*") if path.is_file()]
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
        for group in re.findall(r"'?\.\[([\w,]+)\]", line)
        for extra in group.split(",")
    }
    assert named and named <= extras
