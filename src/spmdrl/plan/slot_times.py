"""Seconds of a step's parts by the rates of a device: work of traced operators, messages, and moved bytes.

A part of a step takes the seconds of the rank that takes longest. Waits for others, rewards, environments and the
host's own work between operators beyond a rate per operator aren't in it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from spmdrl.dataflow.samples.volume import Link
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.nouns.roles import WorkerState
from spmdrl.observability.terminal.units import time_text
from spmdrl.plan.account import Message, Span, Work
from spmdrl.plan.device_profile import (
    CROSS_NODE,
    DOCK,
    GENERATION,
    HOST,
    NODE,
    SCORING,
    TRAINING,
    DeviceProfile,
    LinkRate,
    Rates,
)
from spmdrl.plan.link_bytes import PlannedVolume
from spmdrl.plan.planned_rows import RowLengths
from spmdrl.plan.rank_plan import SWITCH, RankPlan, SlotPlan
from spmdrl.plan.resharding_bytes import ReshardingBytes
from spmdrl.runtime.launch import LaunchEnvironment

GIB = 1 << 30
SAMPLE_FLOW = "sample flow"
SWAP = "swap"


def seconds_of_work(work: Work, rates: Rates, *, overlaps: bool) -> float:
    """Return the time of operators: products at the rate that limits them, all others by bytes, and launches."""
    bytes_per_second = rates.gib_per_second * GIB
    computed = max(work.flops / (rates.tflops * 1e12), work.product_bytes / bytes_per_second)
    on_device = computed + (work.num_bytes - work.product_bytes) / bytes_per_second
    launched = work.launches * rates.launch_us / 1e6
    return max(on_device, launched) if overlaps else on_device + launched


def link_of(ranks: Sequence[int], ranks_per_node: int) -> str:
    """Return the kind of the slowest link between ranks."""
    return NODE if len({rank // ranks_per_node for rank in ranks}) == 1 else CROSS_NODE


def share_across_nodes(message: Message, ranks_per_node: int) -> float:
    """Return the share of a message's bytes that leaves a node: on a ring, a line of stages, or between all pairs."""
    nodes = [rank // ranks_per_node for rank in message.ranks]
    if message.operation == "alltoall_base_":
        alike = sum(count * (count - 1) for count in Counter(nodes).values())
        return 1 - alike / (len(nodes) * (len(nodes) - 1))
    hops = list(pairwise(nodes if message.operation == "send" else [*nodes, nodes[0]]))
    return sum(here != there for here, there in hops) / len(hops)


def bytes_sent(planned: Iterable[RankPlan], ranks_per_node: int) -> Mapping[str, Mapping[str, int]]:
    """Return the bytes of a step's messages within worker states by their kind and link, of ranks and those alike."""
    sent: dict[str, Counter[str]] = {}
    for rank in planned:
        for slot in rank.slots:
            links = Counter({NODE: 0, CROSS_NODE: 0})
            for message, count in (Counter() if slot.span is None else slot.span.messages).items():
                num_bytes = count * message.num_bytes * slot.num_repeats * len(rank.alike)
                crossing = round(num_bytes * share_across_nodes(message, ranks_per_node))
                links.update({NODE: num_bytes - crossing, CROSS_NODE: crossing})
            if links.total():
                sent.setdefault(kind_of(slot), Counter()).update(links)
    return sent


def seconds_of_messages(
    messages: Mapping[Message, int], links: Mapping[str, LinkRate], ranks_per_node: int
) -> float:  # fmt: skip
    """Return the time that a rank sends, if nothing else holds it up."""
    total = 0.0
    for message, count in messages.items():
        link = links[link_of(message.ranks, ranks_per_node)]
        doublings = math.ceil(math.log2(max(len(message.ranks), 2)))
        total += count * (link.message_us / 1e6 * doublings + message.num_bytes / (link.gib_per_second * GIB))
    return total


def kind_of(slot: SlotPlan) -> str:
    """Return the kind of work of a worker state."""
    state = next(state for state in WorkerState if state.value == slot.name)
    return {"generate": GENERATION, "train": TRAINING}.get(state.work or "", SCORING)


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the parts of one step."""

    stages: Mapping[str, float]
    step_seconds: float
    """of the whole step: of all parts one after another, or of the slower set of ranks if rows are made ahead"""
    tokens_per_second_per_device: float
    """the paper's Eq. 5, with the planned lengths"""

    def lines(self) -> Iterator[str]:
        """Yield the times as text."""
        parts = ", ".join(
            f"{name} {time_text(seconds)}" for name, seconds in self.stages.items() if seconds > self.step_seconds / 1e3
        )
        yield f"a step: {time_text(self.step_seconds)}: {parts}"
        yield f"tokens per second and device (the paper's Eq. 5): {self.tokens_per_second_per_device:.4g}"


@dataclass(frozen=True)
class Moved:
    """Bytes that a step moves besides its states' own messages, of all ranks together."""

    flow: PlannedVolume
    switch: ReshardingBytes
    is_swapped: bool


def stage_seconds(
    ranks: Iterable[RankPlan], moved: Moved, device: DeviceProfile, launch: LaunchEnvironment
) -> dict[str, float]:  # fmt: skip
    """Return the seconds of each part of a step on a device with rates, in the order of the step."""
    assert device.rates is not None and device.links is not None, "the device has no rates"
    seconds = {SWITCH: _switch_seconds(moved, device.links, launch)}
    if moved.is_swapped:
        swapped = (moved.switch.to_host + moved.switch.from_host) / launch.world_size
        seconds[SWAP] = swapped / (device.links[HOST].gib_per_second * GIB)
    for rank in ranks:
        for slot in rank.slots:
            if slot.span is not None:
                own = _slot_seconds(slot, slot.span, device, launch.local_world_size)
                seconds[slot.name] = max(seconds.get(slot.name, 0.0), own)
    crossing = moved.flow.volume.payload_bytes(Link.CROSS_NODE)
    if launch.num_nodes > 1:
        crossing += moved.flow.volume.metadata_bytes
    dock = launch.num_nodes * device.links[DOCK].gib_per_second * GIB
    seconds[SAMPLE_FLOW] = crossing / dock + moved.flow.host_seconds
    return seconds


def step_times(
    checked: CheckedRun, ranks: Sequence[RankPlan], moved: Moved, device: DeviceProfile, launch: LaunchEnvironment,
    lengths: RowLengths,
) -> StepTimes | None:  # fmt: skip
    """Return the times of a step; None for a device without rates."""
    if device.rates is None:
        return None
    stages, rollout = stage_seconds(ranks, moved, device, launch), checked.config.rollout
    step = sum(stages.values())
    if rollout.lag and checked.config.resources.ranks.generation:
        step = max(stages.get(GENERATION, 0.0), step - stages.get(GENERATION, 0.0))
    num_tokens = rollout.prompts_per_step * rollout.num_generations * (lengths.prompt + lengths.response)
    return StepTimes(stages, step, num_tokens / step / launch.world_size)


def _switch_seconds(moved: Moved, links: Mapping[str, LinkRate], launch: LaunchEnvironment) -> float:
    received = moved.switch.later
    return sum(
        num_bytes / launch.world_size / (links[link].gib_per_second * GIB)
        for link, num_bytes in ((NODE, received.same_node), (CROSS_NODE, received.cross_node))
    )


def _slot_seconds(slot: SlotPlan, span: Span, device: DeviceProfile, ranks_per_node: int) -> float:
    assert device.rates is not None and device.links is not None
    computed = seconds_of_work(span.work, device.rates[kind_of(slot)], overlaps=device.overlaps)
    sent = seconds_of_messages(span.messages, device.links, ranks_per_node)
    busy = max(computed, sent) if device.overlaps else computed + sent
    return slot.num_repeats * busy * (1 + slot.bubble)
