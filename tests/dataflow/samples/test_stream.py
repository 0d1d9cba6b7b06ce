"""Streams: a state takes rows while the states before it still work."""

from __future__ import annotations

import time

import pytest
import torch

from spmdrl.dataflow.samples.balancing.sharing import groups_of_training
from spmdrl.dataflow.samples.dock import TransferDock
from spmdrl.dataflow.samples.samples import Samples
from spmdrl.dataflow.samples.schema import needs_by_state
from spmdrl.dataflow.samples.transport.transport import DockConfig
from spmdrl.resources.layout import UpdateLayout
from spmdrl.resources.mesh import build_update_mesh
from spmdrl.resources.world import World
from spmdrl.types import Batch, WorkerState
from tests.dataflow.samples import flow
from tests.support.ranks import run_ranks

STATE = WorkerState.OLD_LOGPROBS
NAMES = {"prompt_ids", "response_ids"}


def open_dock(world: World, timeout_seconds: float = 20.0, groups: dict | None = None) -> TransferDock:
    needs = needs_by_state({"advantages", "rollout_logprobs", "old_logprobs"})
    return TransferDock(world, needs, DockConfig(timeout_seconds), row_groups=groups, streams=True)


def open_samples(dock: TransferDock) -> Samples:
    samples = dock.open_batch(0, flow.make_prompts(), flow.GROUP_SIZE)
    return samples


def scores_of(batch: Batch) -> Batch:
    out = Batch(batch.rows)
    out.put_ragged("old_logprobs", batch.values("response_ids").float(), batch.offsets("response_ids"))
    return out


def drain(samples: Samples, stream, **budget: int) -> list[list[int]]:
    """Take to the end, and put what the state makes; the rows of each portion."""
    portions = []
    while len(batch := stream.take(**budget)):
        assert batch.to_lists("response_ids") == [flow.response_of(row) for row in batch.rows.tolist()]
        assert batch.to_lists("prompt_ids") == [[row // 4] * (row // 4 % 3 + 1) for row in batch.rows.tolist()]
        samples.put(STATE, scores_of(batch))
        portions.append(batch.rows.tolist())
    stream.close()
    return portions


def finish(dock: TransferDock, samples: Samples) -> int:
    """The rest of the step, after generation and the streamed state; how many rows were trained."""
    samples.commit(STATE)
    flow.reward(samples)
    flow.credit(samples)
    batch = samples.take(WorkerState.UPDATE, {"old_logprobs", "response_ids"})
    assert batch.to_lists("old_logprobs") == [flow.response_of(row) for row in batch.rows.tolist()]
    samples.commit(WorkerState.UPDATE)
    return dock.close_batch(samples).num_trained


def test_a_stream_gives_rows_as_they_come_and_ends_when_all_were_taken():
    samples = open_samples(open_dock(flow.ONE_RANK))
    rows = samples.deal_generation()
    stream = samples.open_stream(STATE, NAMES)
    assert stream.num_ready() == 0
    flow.put_group(samples, rows[4:8])
    assert stream.num_ready() == 4
    assert stream.take(max_rows=3).rows.tolist() == [4, 5, 6]
    flow.put_group(samples, rows[:4])
    assert stream.take(max_rows=2).rows.tolist() == [0, 1]
    # Rows 2 and 3 have 1 + 4 and 1 + 11 tokens.
    assert stream.take(max_tokens=5).rows.tolist() == [2]
    assert stream.take(max_tokens=5).rows.tolist() == [3], "a row that is too long comes alone"
    with pytest.raises(RuntimeError, match="rows 7, 8, 9, 10 and more"):
        stream.close()


def test_dropped_rows_are_not_waited_for():
    samples = open_samples(open_dock(flow.ONE_RANK))
    rows = samples.deal_generation()
    stream = samples.open_stream(STATE, NAMES)
    for start in range(0, 20, 4):
        flow.put_group(samples, rows[start : start + 4])
    samples.mark_dropped(rows[20:], "not made")
    assert len(stream.take()) == 20 and len(stream.take()) == 0
    stream.close()


def test_a_wait_that_ends_names_rows_columns_and_their_maker():
    samples = open_samples(open_dock(flow.ONE_RANK, timeout_seconds=0.05))
    rows = samples.deal_generation()
    stream = samples.open_stream(STATE, NAMES)
    flow.put_group(samples, rows[:4])
    assert len(stream.take()) == 4
    expected = (
        r"old_logprobs waited 0.05 s .* response_ids of rows 4, 5, 6, 7 and more \(20\), from generation on rank 0;"
    )
    with pytest.raises(TimeoutError, match=expected):
        stream.take()


def _streamed_steps(world: World, tensor: int) -> list[dict]:
    """All ranks generate and score at once, twice the same step: first rank 0 is slow, then the last one."""
    groups = None
    if tensor > 1:
        mesh = build_update_mesh(UpdateLayout(shard=world.size // tensor, tensor=tensor), world.device, world.rank)
        groups = groups_of_training(mesh, world.device.torch_device)
    dock = open_dock(world, groups=groups)
    with dock:
        return [_streamed_step(dock, world.rank == slow_rank) for slow_rank in (0, world.size - 1)]


def _streamed_step(dock: TransferDock, is_slow: bool) -> dict:
    samples = open_samples(dock)
    rows = samples.deal_generation()
    stream = samples.open_stream(STATE, NAMES)
    for start in range(0, len(rows), 4):
        time.sleep(0.1 if is_slow else 0.0)
        flow.put_group(samples, rows[start : start + 4])
    portions = drain(samples, stream, max_rows=4)
    samples.commit(WorkerState.GENERATION)
    trained = finish(dock, samples)
    return {"taken": sorted(row for portion in portions for row in portion), "trained": trained, "portions": portions}


@pytest.mark.ranks
@pytest.mark.parametrize(("num_ranks", "ranks_per_node", "tensor"), [(2, 2, 1), (2, 1, 1), (4, 4, 2), (4, 2, 4)])
def test_timing_does_not_decide_who_streams_which_row(num_ranks, ranks_per_node, tensor):
    """Also where a node's rows go to ranks of other nodes, which hear of them by requests."""
    both = run_ranks(num_ranks, _streamed_steps, tensor, ranks_per_node=ranks_per_node)
    fast, slow = zip(*both, strict=True)
    assert [rank["taken"] for rank in fast] == [rank["taken"] for rank in slow]
    for ranks in (fast, slow):
        assert all(rank["trained"] == flow.NUM_ROWS for rank in ranks)
        assert sorted(row for rank in ranks[::tensor] for row in rank["taken"]) == list(range(flow.NUM_ROWS))
        assert all(
            rank["portions"] == ranks[number // tensor * tensor]["portions"] for number, rank in enumerate(ranks)
        )


def _lost_maker(world: World) -> str:
    """Rank 1 waits for rows that rank 0 never makes."""
    dock = open_dock(world, timeout_seconds=0.5)
    samples = open_samples(dock)
    rows = samples.deal_generation()
    stream = samples.open_stream(STATE, NAMES)
    message = ""
    if world.rank == 1:
        flow.put_group(samples, rows[:4])
        try:
            while True:
                stream.take()
        except TimeoutError as error:
            message = str(error)
    dock.abandon()
    return message


@pytest.mark.ranks
def test_a_stream_on_several_ranks_names_the_rank_that_it_waits_for():
    message = run_ranks(2, _lost_maker)[1]
    assert "response_ids of rows" in message and "from generation on rank" in message


def test_streams_see_only_columns_that_their_state_reads():
    samples = open_samples(open_dock(flow.ONE_RANK))
    with pytest.raises(ValueError, match="doesn't wait for"):
        samples.open_stream(STATE, {"reward"})
    assert torch.is_tensor(samples.lengths("prompt_ids"))
