"""The fusion bench trains fused and unfused, and both come to the same."""

from __future__ import annotations

import json

import pytest

from tests.bench.__main__ import main


@pytest.mark.ranks
@pytest.mark.slow
def test_the_fusion_bench_compares_both_orders_in_one_run(tmp_path, capsys):
    out = tmp_path / "out.json"
    sizes = ["--cases", "tool", "--width", "16", "--prompts", "2", "--length", "24", "--steps", "2", "--rounds", "1"]
    assert main(["fusion", *sizes, "--answer-seconds", "0.8", "--json", str(out)]) == 0
    assert "hidden_share" in capsys.readouterr().out
    content = json.loads(out.read_text())
    rows = {row["case"]: row for row in content["rows"]}
    assert rows.keys() == {"tool"} and all(row["equal"] for row in rows.values())
    assert all(0 < row["hideable s"] <= row["waited s"] for row in rows.values())
    # The switch back, which begins before rewards are waited for, is the only other work then.
    assert all(row["unfused hidden s"] < 0.2 * row["waited s"] for row in rows.values())
    assert 0 < content["ratios"]["hidden_share"] <= 1 and content["ratios"]["fused_vs_unfused"] > 0
