"""The bench of checkpoints compares those that threads write with those that training waits for."""

from __future__ import annotations

import json

import pytest

from tests.bench.__main__ import main


@pytest.mark.ranks
@pytest.mark.slow
def test_both_ways_leave_the_same_checkpoints_and_their_waits_are_measured(tmp_path):
    out = tmp_path / "out.json"
    sizes = ["--width", "16", "--prompts", "2", "--length", "8", "--ranks", "1"]
    assert main(["checkpoints", *sizes, "--steps", "8", "--json", str(out)]) == 0
    content = json.loads(out.read_text())
    (row,) = content["rows"]
    assert row["equal"] and row["wait s"] > 0 and row["synchronous wait s"] > 0
    assert row["share"] == content["ratios"]["share"] == row["wait s"] / row["step s"]
