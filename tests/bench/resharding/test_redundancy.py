"""The paper's figures of redundant memory follow from public shapes."""

from __future__ import annotations

import argparse

import pytest

from spmdrl.nouns.batch import WeightSlice
from spmdrl.plan.resharding_bytes import redundant_bytes
from tests.bench.resharding.redundancy import CASES, figures_of, run, unused_bytes


@pytest.mark.slow
def test_the_papers_figures_follow_from_eq_3_and_from_the_plan():
    table = run(argparse.Namespace())
    dense, sparse, larger = table.rows
    assert round(dense["unused a device"]) == 8 and dense["unused in all"] == pytest.approx(
        16 * dense["unused a device"]
    )
    assert dense["R (Eq. 3)"] == pytest.approx(4 * dense["unused a device"])
    for row in (sparse, larger):
        assert row["R (Eq. 3)"] == pytest.approx(row["unused in all"]) and row["R (Eq. 3)"] > 60
    assert all(0 < row["exact a device"] < row["all-gather a device"] for row in table.rows)


def test_redundant_memory_is_the_papers_equation_3():
    redundant = redundant_bytes(8.0, 60.0, update_tensor_size=2, generation_data_size=4, generation_expert_size=4)
    assert redundant == 4 * (8.0 / 2 + 60.0 / 4)


def test_shapes_are_the_public_models():
    found = figures_of(CASES[1])
    assert found.expert_weights == 2 * 48 * 128 * 3 * 2048 * 768
    assert (found.expert_weights + found.tensor_weights + found.other_weights) / 2 == 30_532_122_624


def test_a_slice_used_where_it_lies_leaves_the_rest_unused_and_one_gathered_leaves_all():
    held = [WeightSlice("selected", (4,), (8,)), WeightSlice("gathered", (0,), (4,)), WeightSlice("common", (0,), (5,))]
    wanted = [
        WeightSlice("selected", (6,), (8,)),
        WeightSlice("gathered", (0,), (8,)),
        WeightSlice("common", (0,), (5,)),
    ]
    assert unused_bytes(held, wanted, lambda box: 2 * box.num_elements) == 2 * (2 + 4)
