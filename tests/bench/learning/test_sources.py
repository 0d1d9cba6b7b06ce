"""The sources bench trains on what TRL's users write, and compares rewards before and after."""

from __future__ import annotations

import json

import pytest

from tests.bench.__main__ import main


@pytest.mark.ranks
@pytest.mark.slow
def test_tools_in_trls_form_are_a_row_of_the_sources_bench(tmp_path):
    out = tmp_path / "out.json"
    words = ["sources", "--sources", "TRL: tools", "--prompts", "4", "--steps", "3", "--json", str(out)]
    code = main(words)
    [row] = json.loads(out.read_text())["rows"]
    assert row["glue"].startswith("environment.tools=") and row["turns"] > 1
    assert 0 < row["before"] < 1 and 0 < row["after"] < 1
    assert code == (row["after"] <= row["before"]), "a source that doesn't learn fails the bench"


def test_a_source_that_is_not_known_is_refused(capsys):
    assert main(["sources", "--sources", "TRL: rugs"]) == 2
    assert "--sources 'TRL: rugs' isn't one of TRL: tools, " in capsys.readouterr().err
