"""The experts bench measures steps with packed and with grouped experts."""

from __future__ import annotations

import json

import pytest

from tests.bench.__main__ import main


@pytest.mark.cpu_only(reason="no other device has a layout to pack weights in")
def test_the_experts_bench_has_a_ratio_for_each_dtype_and_number_of_rows(capsys):
    assert main(["experts", "--sizes", "1", "--rows", "4,8", "--rounds", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["dtype"], row["rows"]) for row in rows] == [
        ("float32", 4), ("float32", 8), ("bfloat16", 4), ("bfloat16", 8)
    ]  # fmt: skip
    for row in rows:
        assert row["grouped / packed"] == pytest.approx(row["grouped ms"] / row["packed ms"])
