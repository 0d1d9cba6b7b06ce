from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
import torch
import torch.distributed.rpc as rpc

from spmdrl.dataflow.samples.catalogue import Catalogue
from spmdrl.dataflow.samples.dock import TransferDock
from spmdrl.dataflow.samples.store.warehouse import Warehouse
from spmdrl.dataflow.samples.transport.several_nodes import RemoteWarehouses, SeveralNodes
from spmdrl.dataflow.samples.volume import Link, Volume
from spmdrl.nouns.batch import Batch, WorkerState, offsets_of
from spmdrl.nouns.settings.flow_config import DockConfig
from spmdrl.resources.collectives import barrier, gather_ragged
from spmdrl.resources.world import World
from tests.dataflow.samples.flow import (
    GROUP_SIZE,
    NUM_ROWS,
    ONE_RANK,
    credit,
    generate,
    make_prompts,
    open_dock,
    response_of,
    reward,
    run_step,
)
from tests.support.host_waits import HostWaits
from tests.support.ranks import run_ranks

ALL_ROWS = list(range(NUM_ROWS))


def open_samples(dock: TransferDock):
    samples = dock.open_batch(1, make_prompts(), GROUP_SIZE)
    return samples


def test_one_rank_runs_a_whole_step_without_rpc():
    with open_dock(ONE_RANK) as dock:
        for step in range(2):
            did = run_step(dock, step)
            assert did["generated"] == did["rewarded"] == did["trained"] == ALL_ROWS
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
    assert dock._places[0].warehouse.num_bytes == 0


def test_a_batch_with_rows_left_over_is_not_closed():
    dock = open_dock(ONE_RANK)
    samples = open_samples(dock)
    generate(samples, samples.rows.deal_generation())
    reward(samples)
    with pytest.raises(RuntimeError, match="24 of 24 rows .* row 0 waits for columns advantages before update"):
        dock.close_batch(samples)
    with pytest.raises(ValueError, match="step 1 is still open"):
        dock.open_batch(2, make_prompts(), GROUP_SIZE)
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
    generate(samples, samples.rows.deal_generation())
    reward(samples)
    taken = samples.take(WorkerState.ADVANTAGE, {"reward"})
    wrong = Batch(taken.rows)
    wrong.put_lists("advantages", [[0.0]] * len(taken), torch.float32)
    with pytest.raises(ValueError, match="has 1 values in row 1, but 'response_ids' has 8"):
        samples.put(WorkerState.ADVANTAGE, wrong)


@pytest.mark.parametrize("values", [torch.zeros(4, device="meta"), torch.zeros(4).to_sparse()], ids=["meta", "sparse"])
def test_values_that_the_host_cannot_keep_are_refused(values):
    samples = open_samples(open_dock(ONE_RANK))
    batch = Batch.of_rows(range(4))
    batch.put_dense("reward", values)
    with pytest.raises(ValueError, match="column 'reward' is a torch.* tensor on .*; convert it before putting it"):
        samples.put(WorkerState.REWARD, batch)


def test_columns_of_a_device_are_copied_once_with_one_wait_and_those_of_the_host_are_kept(device):
    dock = open_dock(ONE_RANK)
    samples = open_samples(dock)
    rows = samples.rows.deal_generation()
    batch = Batch.of_rows(rows)
    offsets = offsets_of([len(response_of(row)) for row in rows])
    ids_T = torch.tensor([token for row in rows for token in response_of(row)], dtype=torch.int32, device=device)
    # Computed here: what is put is what these give, however late they run.
    batch.put_ragged("response_ids", ids_T * 1, offsets)
    batch.put_ragged("rollout_logprobs", ids_T * -0.5, offsets)
    batch.put_ragged("versions", ids_T * 0 + 3, offsets)
    batch.put_dense("finished", torch.ones(len(rows), dtype=torch.int32))
    with HostWaits() as host:
        samples.put(WorkerState.GENERATION, batch)
    samples.commit(WorkerState.GENERATION)
    assert host.all.total() == (device.type != "cpu")
    read = samples.read(rows, ["response_ids", "rollout_logprobs", "versions", "finished"])
    assert read.to_lists("response_ids") == [response_of(row) for row in rows]
    assert read.to_lists("rollout_logprobs") == [[-0.5 * token for token in response_of(row)] for row in rows]
    assert read.values("versions").eq(3).all()
    names = ["response_ids", "rollout_logprobs", "versions"] if device.type == "cpu" else []
    for name in names:
        assert read.values(name).data_ptr() == batch.values(name).data_ptr(), name
    assert read.dense("finished").data_ptr() == batch.dense("finished").data_ptr()


def test_a_dock_without_an_update_is_refused():
    with pytest.raises(ValueError, match="lack the update"):
        TransferDock(ONE_RANK, {WorkerState.REWARD: {"response_ids"}}, DockConfig())


def steps_of_rank(world: World, locality: bool = True) -> dict:
    with open_dock(world, DockConfig(20.0, locality=locality)) as dock:
        did = [run_step(dock, step, dropped=(5,)) for step in range(2)]
        volume = dock.volume
        left = dock._places[0].warehouse.num_bytes
    return {
        "steps": did,
        "bytes": {link.value: volume.payload_bytes(link) for link in Link},
        "crossed": sorted(volume.get_bytes[Link.CROSS_NODE]),
        "metadata": volume.metadata_bytes,
        "left": left,
    }


def check_whole_steps(ranks: list[dict]) -> None:
    for step in range(2):
        did = [rank["steps"][step] for rank in ranks]
        for key in ("generated", "rewarded"):
            assert sorted(row for rank in did for row in rank[key]) == ALL_ROWS
        assert sorted(row for rank in did for row in rank["trained"]) == [row for row in ALL_ROWS if row != 5]
        assert all(rank["num_trained"] == NUM_ROWS - 1 and rank["num_dropped"] == {"no reward": 1} for rank in did)
        tokens = [sum(len(response_of(row)) for row in rank["trained"]) for rank in did]
        assert max(tokens) - min(tokens) <= 0.15 * sum(tokens)
    assert all(rank["left"] == 0 for rank in ranks)


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_of_one_node_share_memory_and_open_no_port(num_ranks):
    ranks = run_ranks(num_ranks, steps_of_rank)
    check_whole_steps(ranks)
    assert sum(rank["bytes"]["node"] for rank in ranks) > 0, "somebody read what another rank stored"
    assert all(rank["bytes"]["cross_node"] == 0 and rank["metadata"] > 0 for rank in ranks)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_samples_stay_on_their_nodes_as_far_as_balance_allows(ranks_per_node):
    ranks = run_ranks(2 * ranks_per_node, steps_of_rank, ranks_per_node=ranks_per_node)
    check_whole_steps(ranks)
    stayed = sum(rank["bytes"]["process"] + rank["bytes"]["node"] for rank in ranks)
    assert sum(rank["bytes"]["cross_node"] for rank in ranks) < 0.25 * stayed
    assert not any("prompt_ids" in rank["crossed"] for rank in ranks), "every rank has the prompts anyway"


@pytest.mark.ranks
def test_the_papers_placement_moves_the_same_rows_over_nodes():
    ranks = run_ranks(4, steps_of_rank, False, ranks_per_node=2)
    check_whole_steps(ranks)
    stayed = sum(rank["bytes"]["process"] + rank["bytes"]["node"] for rank in ranks)
    assert sum(rank["bytes"]["cross_node"] for rank in ranks) > 0.5 * stayed
    assert any("prompt_ids" in rank["crossed"] for rank in ranks)


def late_reading(world: World) -> list[list[float]]:
    """The last rank looks at everybody's rows when all others are done with the batch."""
    with open_dock(world) as dock:
        for step in range(2):
            samples = dock.open_batch(step, make_prompts(), GROUP_SIZE)
            generate(samples, samples.rows.deal_generation())
            reward(samples)
            credit(samples)
            samples.take(WorkerState.UPDATE, {"response_ids"})
            samples.commit(WorkerState.UPDATE)
            read = []
            if world.rank == world.size - 1:
                time.sleep(0.3)
                read = samples.read(ALL_ROWS, ["prompt_ids", "response_ids"]).to_lists("response_ids")
            dock.close_batch(samples)
    return read


@pytest.mark.ranks
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_rows_stay_until_the_slowest_rank_has_read_them(ranks_per_node):
    assert run_ranks(2, late_reading, ranks_per_node=ranks_per_node)[-1] == [response_of(row) for row in ALL_ROWS]


def rewards_of(rows: list[int]) -> Batch:
    batch = Batch.of_rows(rows)
    batch.put_dense("reward", torch.zeros(len(rows)))
    return batch


def requests_that_fail(world: World) -> dict[str, str]:
    """Rank 1 requests what rank 0's warehouse lacks, sends it gadgets, and finds it stopped and then gone."""
    nodes = SeveralNodes(0, Volume(), world, RemoteWarehouses([Warehouse()], world, 1.0), locality=True)
    on_rank_0 = Catalogue(np.zeros(NUM_ROWS, dtype=np.int64))
    pids = [int(pid) for pid in gather_ragged(torch.tensor([os.getpid()]))]
    errors: dict[str, str] = {}

    def note(name: str, call, *args, **kwargs) -> None:
        try:
            call(*args, **kwargs)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"

    if world.rank == 1:
        note("missing", nodes.get, np.array([7]), ["reward"], on_rank_0)
        note("gadget", rpc.rpc_sync, "dock0", os.system, args=("true",))
        note("after", nodes.get, np.array([8]), ["reward"], on_rank_0)
        os.kill(pids[0], signal.SIGSTOP)
        started = time.perf_counter()
        note("stopped", nodes.get, np.arange(3, 9), ["reward", "finished"], on_rank_0)
        errors["seconds"] = str(time.perf_counter() - started)
        os.kill(pids[0], signal.SIGCONT)
    barrier()
    if world.rank == 0:
        nodes.leave(graceful=False)
    barrier()
    if world.rank == 1:
        note("gone", nodes.put, rewards_of([4, 5]), on_rank_0)
        nodes.leave(graceful=True)
    return errors


@pytest.mark.ranks
def test_a_request_that_fails_says_who_waited_for_what():
    errors = run_ranks(2, requests_that_fail, ranks_per_node=1)[1]
    assert "warehouse 0 (rank 0), requested by rank 1: row 7 has no column 'reward'" in errors["missing"]
    assert "refused a remote message that names posix.system" in errors["gadget"]
    assert "row 8 has no column" in errors["after"], "the warehouse goes on after a refused message"
    assert errors["stopped"].startswith("TimeoutError: rank 1 waited 1.")
    assert "columns reward, finished of rows 3..8 (6 of them) from warehouse 0 (rank 0)" in errors["stopped"]
    assert float(errors["seconds"]) < 5
    assert errors["gone"].startswith("ConnectionError: rank 1 waited")
    assert "columns reward of rows 4..5 (2 of them) in warehouse 0 (rank 0)" in errors["gone"]


def killed_in_mid_step(world: World) -> None:
    """All ranks hold rows in shared memory and listen for requests when the last one is killed."""
    dock = open_dock(world)
    samples = open_samples(dock)
    generate(samples, samples.rows.deal_generation())
    barrier()
    if world.rank == world.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    reward(samples)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_a_killed_rank_leaves_no_memory_process_or_port(ranks_per_node):
    """What is left is looked at after each test that starts ranks."""
    with pytest.raises(RuntimeError, match=r"rank \d"):
        run_ranks(4, killed_in_mid_step, ranks_per_node=ranks_per_node)
