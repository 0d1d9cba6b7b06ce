"""The sessions bench trains with and without sessions, and both come to the same."""

from __future__ import annotations

import json

import pytest

from tests.bench.__main__ import main


@pytest.mark.ranks
@pytest.mark.slow
def test_the_sessions_bench_compares_both_forms_of_one_environment(tmp_path, capsys):
    out = tmp_path / "out.json"
    sizes = ["--start", "1", "--steps", "2", "--prompts", "2", "--rounds", "1", "--rows", "64"]
    assert main(["sessions", *sizes, "--json", str(out)]) == 0
    assert "sessions_vs_none" in capsys.readouterr().out
    content = json.loads(out.read_text())
    none, sessions = content["rows"]
    assert none["equal"] and none["turns"] == sessions["turns"] > 1
    assert none["open s"] == 0 < sessions["open s"]
    assert all(ratio > 0 for ratio in content["ratios"].values())
