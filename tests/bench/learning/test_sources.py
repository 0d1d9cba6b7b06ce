"""The sources bench trains on what TRL's users write, and compares rewards before and after."""

from __future__ import annotations

import json

import pytest

from tests.bench.__main__ import main
from tests.bench.learning.killed_sources import is_kept, made_again


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


def test_answers_of_calls_that_were_made_again_are_found(tmp_path):
    sample = {"turns": [["1", ""], ["2", "user\n10.5.7"], ["3", "user\n30.9.9"]]}
    (tmp_path / "samples.jsonl").write_text(json.dumps(sample))
    assert made_again(tmp_path, ["10.5.7"], ["30.9.9"]) == []
    assert made_again(tmp_path, ["10.5.7", "0.5.6"], ["20.6.8", "30.9.9"]) == ["0.5.6", "20.6.8"]


@pytest.mark.parametrize("found", ["other metrics: 3.loss", "2 of 9 calls made again", "other state: a, calls once"])
def test_what_differs_after_a_kill_fails_the_bench(found):
    row = {"source": "TRL: tools", "in a call": "equal, calls once", "one rank": "-"}
    assert is_kept(row) and not is_kept({**row, "in a call": found})


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--sources", "TRL: rugs"], "--sources 'TRL: rugs' isn't one of TRL: tools, "),
        (["--sources", "impure: a session"], "--sources 'impure: a session' isn't one of TRL: tools, "),
        (["--kills", "at night"], "--kills 'at night' isn't one of in a call, "),
    ],
)
def test_what_is_not_known_is_refused(words, problem, capsys):
    assert main(["sources", *words]) == 2
    assert problem in capsys.readouterr().err
