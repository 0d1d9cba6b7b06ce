"""The resharding bench: three ways fill the same weights, and ratios are of what was measured."""

from __future__ import annotations

import argparse
import json

import pytest

from spmdrl.resources.layout import UpdateLayout
from tests.bench.resharding.resharding import add_arguments, layouts_of, model_of, ratios_of, run
from tests.bench.resharding.resharding_ranks import WAYS, ReshardFigures, ReshardTask, measure_resharding
from tests.support.ranks import run_ranks

SMALL = [
    *("--vocab-size", "64", "--hidden-size", "32", "--intermediate-size", "48", "--num-layers", "2"),
    *("--num-heads", "4", "--num-kv-heads", "2", "--bucket-mib", "0.02", "--rounds", "1"),
]


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([*SMALL, *words])


def a_rank(**changes) -> ReshardFigures:
    values = {
        "least_bytes": 100,
        "buffer_bytes": {"exact": 5, "allgather": 8},
        "received_bytes": {"exact": 100, "allgather": 110, "full_tensor": 200},
        "seconds": {"exact": [1.0, 9.0, 1.0], "allgather": [2.0] * 3, "full_tensor": [4.0] * 3},
        "temporary_bytes": {"exact": [4, 6, 5], "allgather": [8] * 3, "full_tensor": [50] * 3},
        "switch_seconds": [1.0] * 3,
        "update_bytes": 80,
        "generation_bytes": 90,
        "peak_bytes": [95, 100, 95],
        "peak_resident_bytes": [95, 110, 95],
    }
    return ReshardFigures(**(values | changes))


def test_ratios_are_those_of_the_slowest_rank_and_the_worst_layout():
    slower = a_rank(seconds={"exact": [1.5] * 3, "allgather": [2.0] * 3, "full_tensor": [4.0] * 3})
    worse = a_rank(received_bytes={"exact": 150, "allgather": 150, "full_tensor": 200})
    found = {UpdateLayout(shard=2): [a_rank(), slower], UpdateLayout(shard=1, tensor=2): [a_rank(), worse]}
    assert ratios_of(found, bucket_bytes=10) == {
        "exact_bytes_vs_least": 250 / 200,
        "exact_temporary_vs_bucket": 0.5,
        "exact_temporary_resident_vs_bucket": 0.6,
        "exact_seconds_vs_full_tensor": 1.5 / 4.0,
        "allgather_seconds_vs_full_tensor": 0.5,
        "switch_peak_vs_larger_state": 1.0,
        "switch_peak_resident_vs_larger_state": 1.1,
    }


@pytest.mark.ranks
def test_all_ways_fill_weights_cut_along_two_dims_and_exact_receives_the_least():
    given = arguments()
    layout = layouts_of(4)[1]
    assert (layout.shard, layout.tensor) == (2, 2)
    task = ReshardTask(model_of(given), layout, "bfloat16", 20_000, given.rounds)
    for rank in run_ranks(4, measure_resharding, task):
        assert set(rank.seconds) == set(rank.received_bytes) == set(rank.temporary_bytes) == set(WAYS)
        assert rank.received_bytes["exact"] == rank.least_bytes > 0
        # Those who gather whole parameters move them in the trainer's float32.
        assert rank.received_bytes["full_tensor"] == 2 * rank.least_bytes
        assert all(num_bytes <= 20_000 for num_bytes in rank.buffer_bytes.values())
        assert rank.update_bytes > rank.generation_bytes > 0 and rank.peak_bytes[0] >= rank.update_bytes


@pytest.mark.slow
def test_the_bench_runs_ranks_of_its_own():
    table = run(arguments("--ranks", "2"))
    assert table.passed and [row["way"] for row in table.rows[:3]] == list(WAYS)
    assert json.loads(table.to_json())["ratios"]["exact_bytes_vs_least"] == 1.0
