"""The bench of served pages measures what it says; its limits are for larger sizes."""

from __future__ import annotations

import json

from tests.bench.__main__ import main
from tests.bench.pages import pages


def test_few_small_runs_are_within_the_limits_of_memory(tmp_path, monkeypatch):
    # Other tests run beside it.
    monkeypatch.setattr(pages, "INDEX_SECONDS", 60.0)
    monkeypatch.setattr(pages, "PAGE_SECONDS", 60.0)
    out = tmp_path / "pages.json"
    sizes = "--runs 3 --steps 20 --live 20 --requests 5"
    assert main(["pages", *sizes.split(), "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert len(found["rows"]) == 4 and len(found["resident_mib"]) > 5 and all(row["s"] > 0 for row in found["rows"])
