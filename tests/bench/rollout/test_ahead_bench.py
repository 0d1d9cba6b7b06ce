"""The bench of ranks that only generate compares both, and delays runs that must keep their bits."""

from __future__ import annotations

import json

import pytest

from tests.bench.__main__ import main


@pytest.mark.ranks
@pytest.mark.slow
def test_the_bench_compares_ranks_apart_with_the_same_together(tmp_path, capsys):
    out = tmp_path / "out.json"
    words = ["--only", "reward", "--ranks", "2", "--start", "1", "--steps", "4", "--rounds", "1", "--rows", "64"]
    assert main(["ahead", *words, "--prompts", "1", "--workers", "4", "--hidden", "32", "--json", str(out)]) == 0
    assert "rows per second, apart over together: reward" in capsys.readouterr().out
    together, apart = json.loads(out.read_text())["rows"]
    assert together["train side waits"] == 0 < apart["train side waits"] + apart["generation side waits"] < 2
    assert together["rows/s"] > 0 < apart["rows/s"]
    assert together["generation s"] > 0.2 < apart["generation s"], "rewards sleep"


@pytest.mark.ranks
@pytest.mark.slow
def test_delayed_runs_are_compared_with_one_that_is_not(tmp_path):
    out = tmp_path / "out.json"
    assert main(["ahead", "--delays", "1", "--only", "plain", "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["equal"] == row["delayed runs"] == 1 < row["times as long"]
