"""The bench of adapters runs one pass over rows twice beside two passes."""

from __future__ import annotations

import json

from tests.bench.__main__ import main


def test_the_adapters_bench_finds_the_same_log_probs_in_one_pass_and_in_two(tmp_path, capsys):
    out, sizes = tmp_path / "out.json", ["--prompts", "1", "2", "--group", "3", "--length", "12", "--rounds", "2"]
    assert main(["adapters", *sizes, "--json", str(out)]) == 0
    assert "medians over 2 rounds" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert [row["prompts"] for row in found["rows"]] == [1, 2]
    assert all(row["difference"] < 1e-4 for row in found["rows"]) and min(found["ratios"].values()) > 0
