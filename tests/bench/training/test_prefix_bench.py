"""The bench of shared prompts runs updates and log-prob passes with and without them."""

from __future__ import annotations

import json

from tests.bench.__main__ import main


def test_the_prefix_bench_finds_the_same_losses_with_and_without_sharing(tmp_path, capsys):
    out, sizes = tmp_path / "out.json", ["--prompts", "2", "--group", "3", "--length", "15", "--rounds", "2"]
    assert main(["prefix", "--model", "1m", *sizes, "--ragged", "--device", "cpu", "--json", str(out)]) == 0
    assert "medians over 2 rounds" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert {(row["prompt:response"], row["pass"]) for row in found["rows"]} == {
        (shape, name) for shape in ("4:1", "1:1", "1:4") for name in ("update", "logprobs")
    }
    assert all(row["difference"] < 1e-4 for row in found["rows"]) and min(found["ratios"].values()) > 0
