"""Pages of the documentation: lines that fit a screen, and links that lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("configs/recipes/**/*.md"))]
# Made from the code.
GENERATED = {"config.md"}
WIDTH = 120
LINK = re.compile(r"\]\(([^)\s]*)\)")
CODE = re.compile(r"`[^`]*`")
HEADING = re.compile(r"^#+ (.+)$")


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines outside code blocks."""
    in_code = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield number, line


def too_long(line: str) -> bool:
    """True for a line that a space within its width could break. Rows of tables and code spans aren't broken."""
    breakable = CODE.sub(lambda span: "x" * len(span[0]), line).strip()
    return len(line) > WIDTH and not breakable.startswith("|") and " " in breakable[:WIDTH]


def anchor(heading: str) -> str:
    """The fragment that GitHub gives a heading."""
    text = LINK.sub("]", heading).lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {anchor(found[1]) for _, line in prose(page) if (found := HEADING.match(line))}


def leads_nowhere(page: Path, target: str) -> bool:
    path, _, fragment = target.partition("#")
    aim = page.parent / path if path else page
    return not aim.exists() or bool(fragment) and fragment not in anchors(aim)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in GENERATED], ids=name_of)
def test_lines_of_a_page_are_wrapped(page: Path) -> None:
    long = [f"{name_of(page)}:{number}: {len(line)} characters" for number, line in prose(page) if too_long(line)]
    assert not long, f"wrap these lines at {WIDTH} characters"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_between_pages_lead_to_a_file_and_a_heading(page: Path) -> None:
    targets = [target for _, line in prose(page) for target in LINK.findall(line) if "://" not in target]
    assert not [target for target in targets if leads_nowhere(page, target)]


def test_results_is_tables_and_stays_short() -> None:
    assert len((ROOT / "docs/results.md").read_text(encoding="utf-8").splitlines()) <= 250


def test_the_notebook_lists_each_of_its_pages() -> None:
    index = (ROOT / "docs/notebook/README.md").read_text(encoding="utf-8")
    assert not [page.name for page in ROOT.glob("docs/notebook/*.md") if f"({page.name})" not in index + "(README.md)"]


def test_every_page_has_its_place_in_the_sites_navigation() -> None:
    navigation = (ROOT / "launch/site/mkdocs.yml").read_text(encoding="utf-8")
    assert not [page.name for page in ROOT.glob("docs/*.md") if f": {page.name}\n" not in navigation]


@pytest.mark.parametrize("name", ["architecture.md", "CONTRIBUTING.md"])
def test_files_that_a_page_names_are_there(name: str) -> None:
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / name).read_text(encoding="utf-8"))
    files = [f"/{path.relative_to(ROOT)}" for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.py")]
    assert named and not [file for file in named if not any(there.endswith(f"/{file}") for there in files)]
