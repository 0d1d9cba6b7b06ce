"""The metadata bench measures every state, and news take fewer bytes than the closed formula, which packs nothing."""

from __future__ import annotations

import argparse

import pytest

from tests.bench.samples import metadata


def run(*words: str):
    parser = argparse.ArgumentParser()
    metadata.add_arguments(parser)
    return metadata.run(parser.parse_args(words))


@pytest.mark.parametrize("states", [6, 8])
def test_each_state_has_its_bytes_and_microseconds(states):
    table = run("--rows", "512", "--nodes", "4", "--ranks-per-node", "2", "--states", str(states), "--steps", "2")
    assert len(table.rows) == states + 1
    by_state = {row["state"]: row for row in table.rows}
    assert by_state["update"]["received_bytes"] == 0
    assert by_state["generation"]["received_bytes"] > by_state["reward"]["received_bytes"] > 0
    parts = [row for row in table.rows if row["state"] != "step"]
    assert by_state["step"]["received_bytes"] == sum(row["received_bytes"] for row in parts)
    assert all(row["sum_us"] > 0 for row in parts)
    assert table.details["bytes_per_rank_and_step"] == by_state["step"]["received_bytes"]


def test_news_take_fewer_bytes_than_numbers_of_the_least_width():
    table = run("--rows", "16384", "--nodes", "4", "--ranks-per-node", "2", "--steps", "1")
    assert 0.5 < table.details["ratios"]["received_vs_formula"] < 0.9
