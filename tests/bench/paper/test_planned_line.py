"""The plan's line over nodes: its bytes are those of ranks on emulated nodes, and its seconds follow from them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from spmdrl.dataflow.samples.volume import Link
from spmdrl.runtime.launch import LaunchEnvironment
from tests.bench.harness.bench_ranks import BenchRanks
from tests.bench.harness.emulated_nodes import INTERFACE, emulated_nodes, refusal
from tests.bench.nodes.flow_rank import FlowTask, measure_variants
from tests.bench.nodes.sample_flow import FlowSize, make_step
from tests.bench.paper.planned_line import (
    APART,
    AS_EMULATED,
    HostSeconds,
    MeasuredNodes,
    PlannedNodes,
    planned_flow,
    planned_lines,
    planned_steps,
)

_reason = refusal()
SMALL = FlowSize(rows_per_node=64, max_prompt_length=64, max_response_length=256)


@pytest.mark.skipif(_reason is not None, reason=str(_reason))
@pytest.mark.ranks
@pytest.mark.slow
def test_planned_bytes_are_those_of_two_nodes_and_of_the_link_between_them():
    size = replace(FlowSize(), scored_tokens_per_second=math.inf, decode_steps_per_second=math.inf)
    with emulated_nodes(2, 3e8) as two:
        ranks = BenchRanks(2, nodes=two, start_method="forkserver").call(measure_variants, FlowTask(size, 1, INTERFACE))
    launch, planned, wire = LaunchEnvironment(world_size=2, local_world_size=1), {}, {}
    for variant, locality in (("dock", True), ("dock, locality off", False)):
        steps = [make_step(size, 2, number) for number in (0, 1)]
        volume = planned_steps(planned_flow(size, launch, locality=locality), steps)[1].volume
        planned[variant] = {link.value: volume.payload_bytes(link) for link in Link}
        counted = {link: sum(rank[variant].payload_bytes[link] for rank in ranks) for link in planned[variant]}
        # Groups that end at the same token are one put in the plan, two here; each has an offset more than it has rows.
        assert counted == pytest.approx(planned[variant], rel=1e-5)
        wire[variant] = sum(rank[variant].over_link.sent for rank in ranks)
    near, far = planned
    assert planned[near]["cross_node"] == 0 < planned[far]["cross_node"]
    # What is on the link without payload, metadata and the ranks' meetings, is there in both.
    assert wire[far] - wire[near] == pytest.approx(planned[far]["cross_node"], rel=0.01)


def test_each_node_has_the_same_planned_work_and_the_papers_placement_leaves_one_row_in_n_at_home():
    plans = {count: PlannedNodes.of(SMALL, count, locality=False) for count in (1, 2, 4)}
    alone = plans[1].steps[0].volume.payload_bytes(Link.PROCESS)
    for count, plan in plans.items():
        assert plan.compute_seconds == pytest.approx(plans[1].compute_seconds, rel=0.02)
        crossing = plan.steps[0].volume.payload_bytes(Link.CROSS_NODE)
        assert crossing == pytest.approx((1 - 1 / count) * count * alone, rel=0.1)
    near = PlannedNodes.of(SMALL, 4, locality=True)
    assert near.crossing_megabytes < plans[4].crossing_megabytes / 20


def test_the_line_takes_its_host_seconds_from_one_and_two_nodes_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    plans = {count: PlannedNodes.of(SMALL, count, locality=False) for count in (1, 2, 8)}
    measured = {1: MeasuredNodes(0.01, 0.05), 2: MeasuredNodes(0.2, 0.11)}
    host = HostSeconds.of(measured[1], measured[2], plans, link_mb=100.0)
    steps = {count: host.step_seconds(AS_EMULATED, nodes, 100.0) for count, nodes in plans.items()}
    dispatch = {count: seconds - plans[count].compute_seconds for count, seconds in steps.items()}
    assert dispatch[1] == pytest.approx(0.01) and dispatch[2] == pytest.approx(0.2)
    # Eight nodes take turns on two cores: four times a rank's processor seconds, and one node's part of the bytes.
    link = plans[8].flow_seconds(0.0, 100.0)
    assert dispatch[8] == pytest.approx(4 * host.of_processor(plans[8]) + host.waits + link)
    assert link == pytest.approx(plans[8].crossing_megabytes / 100.0, rel=0.05)
    apart = host.step_seconds(APART, plans[8], 100.0) - plans[8].compute_seconds
    assert apart == pytest.approx(host.of_processor(plans[8]) + link)
    lines = planned_lines(measured, [1, 8], SMALL, locality=False, link_mb=100.0)
    assert lines[AS_EMULATED][0] == lines[APART][0] == (1, 1.0)
    assert lines[AS_EMULATED][1][1] < lines[APART][1][1] < 1
