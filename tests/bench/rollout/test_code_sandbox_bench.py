"""The sandbox bench measures right programs in each case."""

from __future__ import annotations

import json

from tests.bench.__main__ import main


def test_the_sandbox_bench_has_a_figure_for_each_case(capsys):
    assert main(["sandbox", "--calls", "20", "--rounds", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["case"] for row in rows] == ["one box per row", "20 tests per row", "asserts", "plain python"]
    assert all(row["calls/s"] > 1 for row in rows)
