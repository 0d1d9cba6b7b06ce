"""mkdocs hooks: pages from outside docs/, and links to files that the site doesn't have.

`SPMDRL_REPOSITORY=https://...` is the repository's address up to a file's path, such as .../blob/main; without it, a
link to a file outside the site becomes the file's name.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

from spmdrl.config.coming_from import pages  # noqa: E402 - from the clone

COMING_FROM = {f"coming_from/{name}.md": "\n".join(lines) + "\n" for name, lines in pages().items()}
REPOSITORY = os.environ.get("SPMDRL_REPOSITORY", "").rstrip("/")
FENCE = re.compile(r"^( *)```.*?^ *```$", re.MULTILINE | re.DOTALL)
# Wide screens show wide code; others wrap what would be cut, such as a command's comment.
STYLE = ".md-grid { max-width: 76rem } .md-typeset pre > code { white-space: pre-wrap }\n"
LINK = re.compile(r"(!?)\[((?:[^\[\]`]|`[^`]*`)*)\]\(([^)\s]+)\)")
page_of: dict[str, str] = {}
"""address in the site of each file of the repository that it has"""


def on_config(config: Any) -> Any:
    """Give the navigation the pages of folders, whose names aren't listed there."""
    docs, parts = ROOT / "docs", {title: pages for part in config["nav"] for title, pages in part.items()}
    recipes = [{_title(path.read_text(encoding="utf-8")): f"recipes/{_name(path)}"} for path in _outside()]
    parts["Start"].append({"Recipes": recipes})
    parts["Coming from"] += [{_title(text): name} for name, text in COMING_FROM.items()]
    notebook = sorted(docs.glob("notebook/*.md"), key=lambda path: (path.name != "README.md", path.name))
    titled = [{_title(path.read_text(encoding="utf-8")): f"notebook/{path.name}"} for path in notebook]
    parts["Inside"].append({"Notebook": titled})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add README.md and the recipes' pages, and take down which file became which page."""
    for file in files:
        page_of[f"docs/{file.src_uri}"] = file.src_uri
    files.append(File.generated(config, "wide.css", content=STYLE))
    added = {"index.md": ROOT / "README.md"} | {f"recipes/{_name(path)}": path for path in _outside()}
    for uri, path in added.items():
        files.append(File.generated(config, uri, content=path.read_text(encoding="utf-8")))
        page_of[str(path.relative_to(ROOT))] = uri
    for name, text in COMING_FROM.items():
        files.append(File.generated(config, name, content=text))
        page_of[f"docs/{name}"] = name
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to pages and files of the site, or to the repository; a file's name becomes its page's title."""
    source = PurePosixPath(next(path for path, uri in page_of.items() if uri == page.file.src_uri))
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(lambda link: _moved(link, source), markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(lambda link: _moved(link, source), markdown[end:])])


def _moved(link: re.Match[str], source: PurePosixPath) -> str:
    mark, text, target = link.groups()
    path, hash_sign, fragment = target.partition("#")
    if "://" in target or not path:
        return link[0]
    wanted = os.path.normpath(source.parent / path)
    found = next((name for name in (wanted, f"{wanted}/README.md") if name in page_of), None)
    if found is not None:
        if text.endswith(".md") and (ROOT / found).exists():
            text = _title((ROOT / found).read_text(encoding="utf-8"))
        own = PurePosixPath(page_of[str(source)]).parent
        return f"{mark}[{text}]({os.path.relpath(page_of[found], own)}{hash_sign}{fragment})"
    if not (ROOT / wanted).exists():
        raise ValueError(f"{source}: there is no {wanted}")
    if REPOSITORY:
        return f"[{text}]({REPOSITORY}/{wanted}{hash_sign}{fragment})"
    return f"`{wanted}`" if text.strip("`") in wanted else f"{text} (`{wanted}`)"


def _outside() -> list[Path]:
    return sorted((ROOT / "configs" / "recipes").glob("**/README.md"))


def _name(path: Path) -> str:
    """Name below the page's folder of the site: a recipe's own folder stands for its README."""
    return path.name if path.parent.name == "recipes" else f"{path.parent.name}.md"


def _title(text: str) -> str:
    return text.partition("\n")[0].lstrip("# ")
