"""The balance bench deals as the product does, and its figures are those of the shares."""

from __future__ import annotations

import json

import numpy as np
import pytest

from spmdrl.dataflow.samples.balancing.balance import RowLoads, Taker
from tests.bench.__main__ import main
from tests.bench.samples.balance_deals import idle_share, least_foreign_rows, rows_of_table


def test_costs_are_dealt_evenly_where_numbers_are_not_and_rows_stay_where_they_may():
    for row in rows_of_table(128, 8, [(8, 1), (8, 4)]):
        assert row["update, (max - min) / mean"] <= 0.05 and row["update, max / mean"] <= 1.021
        assert row["idle share"] < row["by numbers  "]
        assert row["least possible"] <= row["cross-node rows"] <= row["least possible"] + row["nodes"]
        if row["prompts"] == "seen":
            assert row["generation, max / mean"] < row["by numbers"]


def test_the_fewest_rows_that_must_leave_a_node_are_its_longest_ones():
    loads = RowLoads(np.arange(6), np.array([0, 0, 0, 0, 1, 1]), np.array([50, 30, 30, 30, 20, 40]))
    # A hundred each: 140 stand against 102, so that the longest row is enough.
    assert least_foreign_rows(loads, [Taker(0, 0), Taker(1, 1)]) == 1
    assert least_foreign_rows(loads, [Taker(0, 0), Taker(1, 1), Taker(2, 1)]) == 2


def test_ranks_wait_for_the_slowest_of_each_micro_batch():
    assert idle_share([[100, 100], [100, 100]]) == 0
    assert idle_share([[1000], [1]]) == pytest.approx(0.5, abs=0.01)


@pytest.mark.ranks
@pytest.mark.slow
def test_real_steps_are_compared_in_one_run(tmp_path):
    sizes = ["--groups", "64", "--rounds", "1", "--prompts", "4", "--length", "32", "--steps", "1"]
    main(["balance", *sizes, "--json", str(tmp_path / "out.json")])
    content = json.loads((tmp_path / "out.json").read_text())
    assert set(content["ratios"]) == {"step", "generation", "update"}
    medians = content["medians"]
    assert all(1 <= medians[deal]["generation/imbalance"] <= 2 for deal in ("cost", "rows"))
