from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed.rpc as rpc

from spmdrl.dataflow.samples.dock import TransferDock
from spmdrl.dataflow.samples.transport import DockConfig, LocalTransport, RpcTransport
from spmdrl.dataflow.samples.volume import Link
from spmdrl.resources.collectives import barrier, gather_ragged
from spmdrl.resources.device import find_device
from spmdrl.resources.launch import LaunchEnvironment
from spmdrl.resources.world import World
from spmdrl.types import Batch, WorkerState
from tests.dataflow.samples.flow import (
    GROUP_SIZE,
    NUM_ROWS,
    credit,
    generate,
    make_prompts,
    open_dock,
    response_of,
    reward,
    run_step,
)
from tests.support.ranks import run_ranks

ALL_ROWS = list(range(NUM_ROWS))
ONE_RANK = World(LaunchEnvironment(), find_device("cpu", 0))


def open_samples(dock: TransferDock):
    samples = dock.open_batch(1, NUM_ROWS, GROUP_SIZE)
    samples.put_prompts(make_prompts())
    return samples


def test_one_rank_runs_a_whole_step_without_rpc():
    with open_dock(ONE_RANK) as dock:
        for step in range(2):
            did = run_step(dock, step)
            assert did["generated"] == did["rewarded"] == did["trained"] == ALL_ROWS
            assert did["lengths"] == [len(response_of(row)) for row in ALL_ROWS]
            assert did["num_trained"] == NUM_ROWS and did["num_dropped"] == {}
        assert dock.volume.payload_bytes(Link.PROCESS) > 0
        assert dock.volume.payload_bytes(Link.CROSS_NODE) == dock.volume.metadata_bytes == 0


def test_dropped_rows_are_not_trained_and_are_accounted_for():
    did = run_step(open_dock(ONE_RANK), 0, dropped=(3, 17))
    assert did["trained"] == [row for row in ALL_ROWS if row not in (3, 17)]
    assert did["num_dropped"] == {"no reward": 2}


def test_a_closed_batch_leaves_nothing_in_the_warehouse():
    dock = open_dock(ONE_RANK)
    run_step(dock, 0)
    assert dock._parts.transport.own_warehouse.num_bytes == 0


def test_a_batch_with_rows_left_over_is_not_closed():
    dock = open_dock(ONE_RANK)
    samples = open_samples(dock)
    generate(samples, samples.deal_generation())
    reward(samples)
    with pytest.raises(RuntimeError, match="24 of 24 rows .* row 0 waits for columns advantages before update"):
        dock.close_batch(samples)
    with pytest.raises(ValueError, match="step 1 is still open"):
        dock.open_batch(2, NUM_ROWS, GROUP_SIZE)
    credit(samples)
    with pytest.raises(RuntimeError, match="row 0 is ready for update"):
        dock.close_batch(samples)


def test_misuse_is_refused_with_a_way_out():
    dock = open_dock(ONE_RANK)
    samples = open_samples(dock)
    with pytest.raises(ValueError, match="doesn't wait for"):
        samples.take(WorkerState.UPDATE, {"reward"})
    stranger = Batch.of_rows([0])
    stranger.put_dense("reward", torch.zeros(1))
    with pytest.raises(ValueError, match="row 0, which it didn't take"):
        samples.put(WorkerState.REWARD, stranger)
    generate(samples, samples.deal_generation())
    reward(samples)
    taken = samples.take(WorkerState.ADVANTAGE, {"reward"})
    wrong = Batch(taken.rows)
    wrong.put_lists("advantages", [[0.0]] * len(taken), torch.float32)
    with pytest.raises(ValueError, match="has 1 values in row 1, but 'response_ids' has 8"):
        samples.put(WorkerState.ADVANTAGE, wrong)


def test_prompts_must_fill_the_batch():
    samples = open_dock(ONE_RANK).open_batch(0, NUM_ROWS + GROUP_SIZE, GROUP_SIZE)
    with pytest.raises(ValueError, match="put one row for each of the 7 prompts"):
        samples.put_prompts(make_prompts())


def test_a_dock_without_an_update_is_refused():
    with pytest.raises(ValueError, match="lack the update"):
        TransferDock(ONE_RANK, {WorkerState.REWARD: {"response_ids"}}, LocalTransport())


def steps_of_rank(world: World) -> dict:
    with open_dock(world) as dock:
        did = [run_step(dock, step, dropped=(5,)) for step in range(2)]
        volume = dock.volume
    return {
        "steps": did,
        "bytes": {link.value: volume.payload_bytes(link) for link in Link},
        "metadata": volume.metadata_bytes,
    }


def check_whole_steps(ranks: list[dict]) -> None:
    for step in range(2):
        did = [rank["steps"][step] for rank in ranks]
        for key in ("generated", "rewarded"):
            assert sorted(did[0][key] + did[1][key]) == ALL_ROWS
        assert sorted(did[0]["trained"] + did[1]["trained"]) == [row for row in ALL_ROWS if row != 5]
        assert did[0]["lengths"] == did[1]["lengths"] == [len(response_of(row)) for row in ALL_ROWS]
        assert all(rank["num_trained"] == NUM_ROWS - 1 and rank["num_dropped"] == {"no reward": 1} for rank in did)
        tokens = [sum(len(response_of(row)) for row in rank["trained"]) for rank in did]
        assert abs(tokens[0] - tokens[1]) <= 0.1 * sum(tokens)
    assert ranks[0]["steps"][0] == ranks[0]["steps"][1], "the same input gives the same shares"


@pytest.mark.ranks
def test_two_ranks_of_one_node_run_whole_steps_over_rpc():
    ranks = run_ranks(2, steps_of_rank)
    check_whole_steps(ranks)
    assert ranks[0]["bytes"]["node"] == 0, "rank 0 holds the node's warehouse"
    assert ranks[1]["bytes"]["node"] > 0 and ranks[1]["bytes"]["process"] == 0
    assert all(rank["bytes"]["cross_node"] == 0 and rank["metadata"] > 0 for rank in ranks)


@pytest.mark.ranks
def test_samples_stay_on_their_nodes_as_far_as_balance_allows():
    ranks = run_ranks(2, steps_of_rank, ranks_per_node=1)
    check_whole_steps(ranks)
    for rank in ranks:
        assert rank["bytes"]["node"] == 0
        assert rank["bytes"]["cross_node"] < 0.25 * rank["bytes"]["process"]


def requests_that_fail(world: World) -> dict[str, str]:
    """Rank 1 asks rank 0's warehouse for what it lacks, sends it gadgets, and finds it stopped and then gone."""
    transport = RpcTransport(world, DockConfig(timeout_seconds=1.0))
    pids = [int(pid) for pid in gather_ragged(torch.tensor([os.getpid()]))]
    errors: dict[str, str] = {}

    def note(name: str, call, *args, **kwargs) -> None:
        try:
            call(*args, **kwargs)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"

    if world.rank == 1:
        note("missing", transport.get, 0, torch.tensor([7]), ["reward"])
        note("gadget", rpc.rpc_sync, "dock0", os.system, args=("true",))
        note("after", transport.get, 0, torch.tensor([8]), ["reward"])
        os.kill(pids[0], signal.SIGSTOP)
        started = time.perf_counter()
        note("stopped", transport.get, 0, torch.arange(3, 9), ["reward", "finished"])
        errors["seconds"] = str(time.perf_counter() - started)
        os.kill(pids[0], signal.SIGCONT)
    barrier()
    if world.rank == 0:
        transport.abandon()
    barrier()
    if world.rank == 1:
        note("gone", transport.put, 0, Batch.of_rows([4, 5]))
        transport.close()
    return errors


@pytest.mark.ranks
def test_a_request_that_fails_says_who_waited_for_what():
    errors = run_ranks(2, requests_that_fail)[1]
    assert "warehouse 0 (rank 0), asked by rank 1: row 7 has no column 'reward'" in errors["missing"]
    assert "refused a remote message that names posix.system" in errors["gadget"]
    assert "row 8 has no column" in errors["after"], "the warehouse goes on after a refused message"
    assert errors["stopped"].startswith("TimeoutError: rank 1 waited 1.")
    assert "columns reward, finished of rows 3..8 (6 of them) from warehouse 0 (rank 0)" in errors["stopped"]
    assert float(errors["seconds"]) < 5
    assert errors["gone"].startswith("ConnectionError: rank 1 waited")
    assert "rows 4..5 (2 of them) in warehouse 0 (rank 0)" in errors["gone"]
