"""Measured bytes of the sample flow are those of the paper's Eq. 4, when it runs as the equation counts it.

Eq. 4 has, for each of G x N rows padded to PL and SL, in values of 4 bytes:

- 2 PL: two states fetch the prompt. Nobody puts it over a link, since every rank reads the prompts' file;
- 3 n SL: each of the n items that are as long as the response is put once, by the state that makes it, and fetched
  twice. Here the advantage state and the update fetch them all; the states between take the rows that their rank
  generated, which moves nothing;
- 8 (C + 1) M: the M scalars are put once and fetched twice, too, which is 3 M; the rest is what the C controllers
  receive of them. Ours are replicated, and a rank receives packed news once for all its controllers. So we are below
  the equation here, and above it by 8 bytes of offsets for each row of a ragged column; both are far below 1% at
  these sizes.

Rows are dealt over warehouses whoever makes or takes them (`dock.locality: false`), as in the paper. All links count,
and the sum over ranks is that of all S warehouses.
"""

from __future__ import annotations

import pytest
import torch

from spmdrl.dataflow.samples.dock import TransferDock
from spmdrl.dataflow.samples.samples import Samples
from spmdrl.dataflow.samples.schema import rule_of
from spmdrl.dataflow.samples.volume import FlowShape, Link, Volume, warehouse_gib
from spmdrl.nouns.batch import Batch, WorkerState, offsets_of
from spmdrl.nouns.settings.flow_config import DockConfig
from spmdrl.resources.world import World
from tests.dataflow.samples.flow import make_prompt
from tests.support.ranks import run_ranks

ITEMS = ("response_ids", "rollout_logprobs", "versions", "ref_logprobs", "old_logprobs")
SCALARS = ("finished", "reward", "reward_verdict")
FETCHING = (WorkerState.ADVANTAGE, WorkerState.UPDATE)


def columns_made(num_items: int) -> dict[WorkerState, list[str]]:
    """The columns of a flow with n items, by the state that makes them."""
    made: dict[WorkerState, list[str]] = {}
    for name in (*ITEMS[:num_items], *SCALARS):
        made.setdefault(rule_of(name).made_by, []).append(name)
    return made


def needs_of(num_items: int) -> dict[WorkerState, set[str]]:
    needs = {state: {"response_ids"} for state in columns_made(num_items)}
    needs |= {state: {"prompt_ids", *ITEMS[:num_items], *SCALARS} for state in FETCHING}
    return needs | {WorkerState.GENERATION: {"prompt_ids"}}


def padded(rows: list[int], names: list[str], length: int) -> Batch:
    batch = Batch.of_rows(rows)
    for name in names:
        column = rule_of(name).column
        if column.ragged:
            values = torch.ones(len(rows) * length, dtype=column.dtype)
            batch.put_ragged(name, values, offsets_of([length] * len(rows)))
        else:
            batch.put_dense(name, torch.ones(len(rows), dtype=column.dtype))
    return batch


def run_flow(samples: Samples, flow: FlowShape) -> None:
    """Every state once, each column put once and fetched twice."""
    made = columns_made(flow.num_response_items)
    generated = samples.rows.deal_generation()
    for state, names in made.items():
        rows = generated if state is WorkerState.GENERATION else samples.rows.take_generated(state)
        for start in range(0, len(rows), flow.responses_each):
            group = rows[start : start + flow.responses_each]
            samples.put(state, padded(group, names, flow.max_response_length))
        samples.commit(state)
    wanted = needs_of(flow.num_response_items)[WorkerState.UPDATE]
    for state in FETCHING:
        batch = samples.take(state, wanted)
        assert int(batch.lengths("response_ids").sum()) == len(batch) * flow.max_response_length
        samples.commit(state)


def volumes_of_rank(world: World, flows: list[FlowShape]) -> list[Volume]:
    """What this rank moved for each flow, a step each."""
    needs, moved = needs_of(flows[0].num_response_items), []
    with TransferDock(world, needs, DockConfig(locality=False)) as dock:
        for step, flow in enumerate(flows):
            before = dock.volume.copy()
            prompts = [make_prompt([1] * flow.max_prompt_length)] * flow.num_prompts
            samples = dock.open_batch(step, prompts, flow.responses_each)
            run_flow(samples, flow)
            dock.close_batch(samples)
            moved.append(dock.volume.since(before))
    return moved


def fetched_over(link: Link, volumes: list[Volume]) -> int:
    return sum(volume.get_bytes[link].total() for volume in volumes)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("num_warehouses", "num_items", "sizes"),
    [
        (2, 3, [(8, 4, 256, 2048), (16, 2, 1024, 2048), (4, 8, 64, 4096)]),
        (2, 5, [(8, 4, 512, 1024), (12, 2, 2048, 2048)]),
        (4, 4, [(8, 8, 512, 2048), (8, 4, 128, 3072)]),
    ],
)
def test_bytes_through_a_warehouse_are_those_of_the_papers_equation(num_warehouses, num_items, sizes):
    flows = [
        FlowShape(prompts, responses, prompt_length, response_length, num_items, len(SCALARS))
        for prompts, responses, prompt_length, response_length in sizes
    ]
    ranks = run_ranks(num_warehouses, volumes_of_rank, flows, ranks_per_node=1)
    num_controllers = len(needs_of(num_items))
    for flow, volumes in zip(flows, zip(*ranks, strict=True), strict=True):
        payload = sum(volume.payload_bytes(link) for volume in volumes for link in Link)
        measured = payload + sum(volume.metadata_bytes for volume in volumes)
        expected = warehouse_gib(flow, num_controllers=num_controllers, num_warehouses=num_warehouses) * 1024**3
        assert measured / num_warehouses == pytest.approx(expected, rel=0.01)
        # Whoever takes a row, it lives on any node as likely.
        fetched = sum(fetched_over(link, volumes) for link in Link)
        elsewhere = (num_warehouses - 1) / num_warehouses
        assert fetched_over(Link.CROSS_NODE, volumes) / fetched == pytest.approx(elsewhere, rel=0.01)
