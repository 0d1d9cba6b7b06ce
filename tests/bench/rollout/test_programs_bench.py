"""The programs bench trains with programs and with sessions, and reports their turns per second."""

from __future__ import annotations

import json

import pytest

from tests.bench.__main__ import main


@pytest.mark.ranks
@pytest.mark.slow
def test_the_programs_bench_measures_both_paths(tmp_path, capsys):
    pytest.importorskip("aiohttp")
    out = tmp_path / "out.json"
    words = ["--ranks", "1", "--sessions", "16", "--turns", "2", "--seconds", "0.01", "--steps", "2", "--rounds", "1"]
    assert main(["programs", *words, "--json", str(out)]) == 0
    assert "programs_vs_sessions" in capsys.readouterr().out
    sessions, programs = json.loads(out.read_text())["rows"]
    assert sessions["turns"] > 1 and programs["turns"] > 1
    assert programs["call s"] > 0.01 and programs["open s"] > 0 and programs["turns/s"] > 0
