"""The exchange between nodes: what it moves, and its error when the other side doesn't."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdrl.dataflow.samples.transport.exchange import transfers
from spmdrl.nouns.batch import WorkerState
from spmdrl.nouns.settings.flow_config import DockConfig
from spmdrl.resources.collectives import barrier
from spmdrl.resources.world import World
from spmdrl.runtime.launch import LaunchEnvironment
from tests.dataflow.samples import flow
from tests.support.ranks import run_ranks


@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_each_row_comes_once_from_a_rank_of_its_home(num_nodes, ranks_per_node, data):
    size = num_nodes * ranks_per_node
    launch = LaunchEnvironment(world_size=size, local_world_size=ranks_per_node)
    homes = np.array(data.draw(st.lists(st.integers(0, num_nodes - 1), min_size=1, max_size=20)))
    takers = data.draw(st.lists(st.integers(0, size - 1), min_size=homes.size, max_size=homes.size))
    shares = {rank: np.flatnonzero(np.array(takers) == rank) for rank in range(size)}
    moves = transfers(shares, homes, launch)
    came = sorted(row for move in moves for row in move.rows.tolist())
    assert came == [row for row in range(homes.size) if launch.node_of(takers[row]) != homes[row]]
    for move in moves:
        assert {launch.node_of(move.sender)} == set(homes[move.rows].tolist())
        assert all(takers[row] == move.receiver for row in move.rows)


def take_from_a_rank_that_hangs(world: World) -> str:
    """Rank 0 doesn't come to its part in the exchange; returns rank 1's error."""
    dock = flow.open_dock(world, DockConfig(timeout_seconds=1.0, locality=False))
    samples = dock.open_batch(0, flow.make_prompts(), flow.GROUP_SIZE)
    flow.generate(samples, samples.rows.deal_generation())
    flow.reward(samples)
    barrier()
    message = ""
    if world.rank == 1:
        try:
            samples.take(WorkerState.ADVANTAGE, {"response_ids", "reward"})
        except OSError as error:
            message = f"{type(error).__name__}: {error}"
    else:
        time.sleep(3)
    dock.abandon()
    return message


@pytest.mark.ranks
def test_a_rank_that_hangs_is_named_with_the_rows_that_it_owes():
    message = run_ranks(2, take_from_a_rank_that_hangs, ranks_per_node=1)[1]
    assert message.startswith("TimeoutError: rank 1 exchanges ")
    assert "with rank 0, which didn't answer within dock.timeout_seconds = 1" in message
