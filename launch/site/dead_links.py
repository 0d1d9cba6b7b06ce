"""Links of a built site that lead to no file or anchor: python dead_links.py FOLDER. Ends with 1 if there are any."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """Links and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {values[name] or "" for name in ("id", "name") if name in values}
        self.links += [values[name] or "" for name in ("href", "src") if name in values]


def main(folder: Path) -> int:
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")}
    dead, outside, inside = [], 0, 0
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                outside += 1
                continue
            inside += 1
            aim = path.parent / unquote(parts.path) if parts.path else path
            aim = (aim / "index.html" if aim.is_dir() else aim).resolve()
            # The page for absent ones has links from the site's root.
            if path.name != "404.html" and not (
                aim.is_file() and (aim not in pages or unquote(parts.fragment) in pages[aim].anchors)
            ):
                dead.append(f"{path.relative_to(folder)}: {link}")
    counts = f"{len(pages)} pages, {inside} links inside, {outside} to other hosts, {len(dead)} dead"
    sys.stdout.write("\n".join([*dead, counts, ""]))
    return bool(dead)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
