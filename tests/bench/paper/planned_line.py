"""The planner's line for the sample flow over nodes: rows dealt and bytes counted by the plan's own code.

Nothing is fitted. A step is its slowest ranks' compute, what `spmdrl plan` has for the sample flow, and seconds of the
host. Of the measured figures only those of 1 and 2 nodes are used: processor seconds of a rank, and waits.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Literal

import torch

from spmdrl.config.config import load_config
from spmdrl.dataflow.resharding.gather import Received
from spmdrl.dataflow.samples.balancing.length_history import LengthHistory
from spmdrl.dataflow.samples.volume import Link
from spmdrl.engines.models.make_model import decoder_config
from spmdrl.job.start.start_checks import check_run
from spmdrl.nouns.partition import TOKENS
from spmdrl.plan.device_profile import CROSS_NODE, DOCK, HOST, NODE, DeviceProfile, LinkRate
from spmdrl.plan.link_bytes import PlannedFlow, PlannedStep, PlannedVolume
from spmdrl.plan.resharding_bytes import ReshardingBytes
from spmdrl.plan.slot_times import GIB, SAMPLE_FLOW, Moved, stage_seconds
from spmdrl.runtime.launch import LaunchEnvironment
from tests.bench.nodes.sample_flow import NEEDS, PASSES, FlowSize, FlowStep, make_step

Kind = Literal["plan, as emulated", "plan, machines apart"]
AS_EMULATED: Kind = "plan, as emulated"
APART: Kind = "plan, machines apart"
CALIBRATED = {1, 2}
"""numbers of nodes that must have been measured"""
_NUM_STEPS = 3
_NO_SWITCH = ReshardingBytes(Received(), Received(), 0, 0, 0.0)
_SETTINGS = (
    "model.make={hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1, "
    "intermediate_size: 64}",
    "data.train=synthetic://addition?low=0&high=9&count=40", "reward.functions=[exact]", "train.max_steps=1",
    "algo.kl_coef=0.1", "train.updates_per_step=2", "dock.fuse=false", "log.samples_per_step=0",
)  # fmt: skip


def planned_flow(size: FlowSize, launch: LaunchEnvironment, *, locality: bool) -> PlannedFlow:
    """Return the plan's flow with the states, columns and rules of the bench's dock."""
    rollout = (
        f"rollout={{prompts_per_step: {launch.num_nodes * size.rows_per_node // size.group_size}, "
        f"num_generations: {size.group_size}, max_completion_length: {size.max_response_length}}}"
    )
    settings = [*_SETTINGS, rollout, f"dock.locality={str(locality).lower()}"]
    checked = check_run(load_config([], settings), "train", launch=launch, reads_data=False)
    assert checked.config.model.make is not None
    flow = PlannedFlow(replace(checked, needs=NEEDS), decoder_config(checked.config.model.make), launch)
    # The bench's ranks are alike to its dock, which deals by tokens.
    flow.rules = replace(flow.rules, cost=TOKENS, shares_prompts=False, row_groups={})
    return flow


def planned_steps(flow: PlannedFlow, steps: Iterable[FlowStep]) -> list[PlannedStep]:
    """Plan steps that a new dock runs one after another, so that it expects lengths by those before."""
    history, found = LengthHistory(), []
    for step in steps:
        prompts, responses_B = step.prompts(), step.response_lengths_B.numpy()
        lengths_G, expected_G = step.prompt_lengths_G.numpy(), history.expected(prompts)
        found.append(PlannedStep(flow, lengths_G, responses_B, step=step.step, expected_G=expected_G))
        history.observe(prompts, responses_B.reshape(-1, step.group_size))
    return found


@dataclass(frozen=True)
class PlannedNodes:
    """Planned steps on so many nodes of one rank each."""

    num_nodes: int
    compute_seconds: float
    """of the slowest rank of each state, at the bench's rates"""
    steps: Sequence[PlannedStep]

    @classmethod
    def of(cls, size: FlowSize, num_nodes: int, *, locality: bool) -> PlannedNodes:
        """Plan the steps that the bench counts; the one before them comes first."""
        launch = LaunchEnvironment(world_size=num_nodes, local_world_size=1)
        rows = [make_step(size, num_nodes, number) for number in range(1 + _NUM_STEPS)]
        steps = planned_steps(planned_flow(size, launch, locality=locality), rows)[1:]
        compute = median(_compute_seconds(size, *both) for both in zip(rows[1:], steps, strict=True))
        return cls(num_nodes, compute, steps)

    @property
    def crossing_megabytes(self) -> float:
        """Payload that a node receives from others in a step."""
        return fmean(step.volume.payload_bytes(Link.CROSS_NODE) for step in self.steps) / self.num_nodes / 1e6

    @property
    def controller_seconds(self) -> float:
        return fmean(step.host_seconds for step in self.steps)

    def flow_seconds(self, host_seconds: float, link_mb: float) -> float:
        """Return the plan's seconds of the sample flow over such links, if hosts take these seconds."""
        launch = LaunchEnvironment(world_size=self.num_nodes, local_world_size=1)
        links = dict.fromkeys((NODE, CROSS_NODE, HOST, DOCK), LinkRate(link_mb * 1e6 / GIB))
        device = DeviceProfile("an emulated node", 1.0, "cpu", rates={}, links=links)
        flows = [Moved(PlannedVolume(step.volume, host_seconds), _NO_SWITCH, False) for step in self.steps]
        return fmean(stage_seconds([], flow, device, launch)[SAMPLE_FLOW] for flow in flows)


def _compute_seconds(size: FlowSize, rows: FlowStep, step: PlannedStep) -> float:
    """Return what the bench sleeps: all rows of a rank decode at once, and other states take their tokens in turn."""
    longest = int(rows.response_lengths_B.max()) / size.decode_steps_per_second
    passed = 0
    for state, times in PASSES.items():
        shares = step.rows.shares[state].values()
        passed += times * max(rows.tokens_of(torch.from_numpy(share.copy())) for share in shares)
    return longest + passed / size.scored_tokens_per_second


@dataclass(frozen=True)
class MeasuredNodes:
    """Seconds of a step that the bench measured."""

    dispatch_seconds: float
    """beyond compute"""
    processor_seconds: float
    """of the busiest rank"""


@dataclass(frozen=True)
class HostSeconds:
    """Seconds of a host in a step beside compute and links, of what 1 and 2 nodes measured."""

    alone: float
    """of one node beyond compute"""
    processor: float
    """of its rank's processor"""
    per_megabyte: float
    """more of it for what a node receives from others"""
    waits: float
    """of two nodes beyond all that; below 0 if compute hides some of the processor's seconds"""
    controllers: float
    """part of `processor` that is planned"""
    num_cores: int
    """cores that all nodes share"""

    @classmethod
    def of(
        cls, one: MeasuredNodes, two: MeasuredNodes, planned: Mapping[int, PlannedNodes], link_mb: float
    ) -> HostSeconds:  # fmt: skip
        controllers, crossing = planned[1].controller_seconds, planned[2].crossing_megabytes
        host = cls(one.dispatch_seconds, one.processor_seconds, 0.0, 0.0, controllers, len(os.sched_getaffinity(0)))
        more = max(0.0, two.processor_seconds - host.of_processor(planned[2]))
        host = replace(host, per_megabyte=more / crossing if crossing else 0.0)
        waits = two.dispatch_seconds - planned[2].flow_seconds(host.taking_turns(planned[2]), link_mb)
        return replace(host, waits=waits)

    def of_processor(self, nodes: PlannedNodes) -> float:
        """Return the processor seconds of a rank."""
        more = nodes.controller_seconds - self.controllers
        return self.processor + more + self.per_megabyte * nodes.crossing_megabytes

    def taking_turns(self, nodes: PlannedNodes) -> float:
        """Return the seconds in which all ranks have had their processor seconds on the cores that they share."""
        return self.of_processor(nodes) * max(1.0, nodes.num_nodes / self.num_cores)

    def step_seconds(self, kind: Kind, nodes: PlannedNodes, link_mb: float) -> float:
        """Return the step of a kind of line."""
        if kind == APART:
            return nodes.compute_seconds + nodes.flow_seconds(self.of_processor(nodes), link_mb)
        seconds = self.alone if nodes.num_nodes == 1 else self.taking_turns(nodes) + self.waits
        return nodes.compute_seconds + nodes.flow_seconds(seconds, link_mb)


def planned_lines(
    measured: Mapping[int, MeasuredNodes], counts: Sequence[int], size: FlowSize, *, locality: bool, link_mb: float
) -> dict[Kind, list[tuple[int, float]]]:
    """Return linearity by number of nodes, 1 among them; both lines are calibrated on 1 and 2 `measured` nodes."""
    planned = {count: PlannedNodes.of(size, count, locality=locality) for count in sorted({*counts, *CALIBRATED})}
    host = HostSeconds.of(measured[1], measured[2], planned, link_mb)
    lines = {}
    for kind in (AS_EMULATED, APART):
        steps = {count: host.step_seconds(kind, nodes, link_mb) for count, nodes in planned.items()}
        lines[kind] = [(count, steps[1] / steps[count]) for count in counts]
    return lines
