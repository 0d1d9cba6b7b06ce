"""The plan of a run: memory of its ranks, and whether they fit a device."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, cast

import torch

from spmdrl.dataflow.samples.volume import Link
from spmdrl.job.model.model_source import ModelSource
from spmdrl.job.model.replica import generation_engine_name
from spmdrl.job.start.checked_run import CheckedRun
from spmdrl.nouns.roles import JUDGE, POLICY, Role
from spmdrl.observability.terminal.units import bytes_text
from spmdrl.plan.account import Span
from spmdrl.plan.device_profile import DeviceProfile
from spmdrl.plan.link_bytes import PlannedLengths, PlannedVolume, sample_flow_bytes
from spmdrl.plan.planned_device import NAME
from spmdrl.plan.planned_kernels import take_kernels_of
from spmdrl.plan.planned_rows import RowLengths
from spmdrl.plan.rank_plan import (
    GenerationTrace,
    RankPlan,
    Shared,
    rank_classes,
    slots_of,
    swaps,
    trace_generating,
    trace_rank,
)
from spmdrl.plan.resharding_bytes import ReshardingBytes, resharding_bytes
from spmdrl.plan.slot_times import Moved, StepTimes, bytes_sent, step_times
from spmdrl.plan.traced_generation import PlannedGenerator
from spmdrl.plan.traced_rank import RankTrace, extended
from spmdrl.runtime.launch import LaunchEnvironment

_AS_NATIVE = (
    "NOTE: generation is planned as the native engine's; the run's is vLLM, which takes the same weights and share of "
    "memory, but other times"
)


@dataclass(frozen=True)
class Plan:
    """The plan of a run on so many ranks."""

    device: DeviceProfile
    lengths: RowLengths
    num_ranks: int
    ranks: list[RankPlan]
    """one rank of each kind, the fullest first"""
    flow: PlannedVolume
    """payload of the sample flow in a step, of all ranks together"""
    switch: ReshardingBytes
    """bytes of a switch and of the training state's way to the host and back, of all ranks together"""
    is_swapped: bool
    """True if the training state leaves the device for generation"""
    sent: Mapping[str, Mapping[str, int]]
    """bytes of messages within worker states in a step, of all ranks together, by kind of state and link"""
    seconds: float
    """time that planning took"""
    times: StepTimes | None
    """None for a device without rates, and for a run that would be refused"""
    notes: Sequence[str] = ()

    @property
    def fits(self) -> bool:
        return not self.refusals and self.ranks[0].fullest.peak_bytes <= self.device.memory_bytes

    @property
    def refusals(self) -> dict[str, str]:
        """Reasons why a run would stop, by the part of a step."""
        return {slot.name: slot.refusal for one in self.ranks for slot in one.slots if slot.refusal}

    def to_json(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "fits": self.fits,
            "device": self.device.name,
            "device_bytes": self.device.memory_bytes,
            "ranks": [
                {
                    "rank": one.rank,
                    "alike": list(one.alike),
                    "owners": dict(one.fullest.owners),
                    "peak_bytes": one.fullest.peak_bytes,
                    "slots": {slot.name: dict(slot.owners) for slot in one.slots},
                }
                for one in self.ranks
            ],
            "bytes_by_link": self.bytes_by_link,
            "refusals": self.refusals,
            "notes": list(self.notes),
            **({} if self.times is None else vars(self.times)),
        }

    @property
    def bytes_by_link(self) -> dict[str, Mapping[str, int]]:
        """Bytes of one step of all ranks together, by flow and link."""
        switch, is_swapped = self.switch, self.is_swapped
        return {
            "sample flow": {
                **{link.value: self.flow.volume.payload_bytes(link) for link in Link},
                "metadata": self.flow.volume.metadata_bytes,
            },
            "switch": {"node": switch.later.same_node, "cross_node": switch.later.cross_node},
            "swap": {"to_host": switch.to_host * is_swapped, "from_host": switch.from_host * is_swapped},
            **self.sent,
        }

    def lines(self) -> Iterator[str]:
        """Yield the plan as text."""
        fullest, room = self.ranks[0].fullest, self.device.memory_bytes
        verdict = "fits" if self.fits else "does not fit"
        yield (
            f"{verdict}: {bytes_text(fullest.peak_bytes)} of {bytes_text(room)} on {self.device.name}, in the "
            f"{fullest.name} of rank {self.ranks[0].rank}; {self.num_ranks} ranks, rows of {self.lengths.prompt} + "
            f"{self.lengths.response} tokens"
        )
        for one in self.ranks:
            others = f", as {len(one.alike) - 1} others" if len(one.alike) > 1 else ""
            yield f"rank {one.rank}{others}:"
            for slot in one.slots:
                owners = sorted(slot.owners.items(), key=lambda item: -item[1])
                parts = ", ".join(f"{owner.replace('_', ' ')} {bytes_text(size)}" for owner, size in owners if size)
                yield f"    {slot.name:14}{bytes_text(slot.peak_bytes):>9}  {parts}"
                if slot.refusal:
                    yield f"        REFUSED: {slot.refusal}"
        for flow, links in self.bytes_by_link.items():
            moved = ", ".join(f"{link.replace('_', ' ')} {bytes_text(size)}" for link, size in links.items())
            yield f"{flow}, bytes of a step on all ranks: {moved}"
        yield (
            f"unused after a switch without the swap (the paper's Eq. 3, all devices): "
            f"{bytes_text(round(self.switch.equation_3))}; with it: 0"
        )
        if self.times is not None:
            yield from self.times.lines()
        yield from self.notes
        yield f"planned in {self.seconds:.1f} s"


@dataclass(frozen=True)
class PlannedRun:
    """A run to plan."""

    checked: CheckedRun
    sources: Mapping[Role, ModelSource]
    launch: LaunchEnvironment
    device: DeviceProfile
    lengths: RowLengths

    def of_rank(self, rank: int) -> LaunchEnvironment:
        """Return the launch environment of a rank."""
        return replace(self.launch, rank=rank, local_rank=rank % self.launch.local_world_size)


def plan_run(run: PlannedRun) -> Plan:
    """Plan one rank of each kind."""
    return _planned(run, rank_classes(run.checked, run.sources, run.launch.world_size), is_whole=False)


def _planned(run: PlannedRun, classes: Sequence[list[int]], *, is_whole: bool) -> Plan:
    """Plan the first rank of each class."""
    started = time.perf_counter()
    checked, total_bytes = run.checked, run.device.memory_bytes
    take_kernels_of(run.device.kernels)
    _, generating = checked.sets_of(run.launch.world_size)

    def trace(rank: int, more_passes: int | None) -> RankTrace:
        return trace_rank(checked, run.sources, run.of_rank(rank), run.lengths, more_passes=more_passes)

    def generate(planned: PlannedGenerator, kept_bytes: int) -> GenerationTrace:
        return trace_generating(
            planned, run.of_rank(planned.ranks[0]), total_bytes=total_bytes, kept_bytes=kept_bytes
        )  # fmt: skip

    decoders = {role: source.decoder for role, source in run.sources.items()}
    lengths = PlannedLengths(run.lengths.prompt, run.lengths.response)
    is_swapped = swaps(checked, run.sources, run.launch, total_bytes)
    counts, given = [None] if is_whole else [1, 0], (run.lengths, run.launch.world_size)
    policy = PlannedGenerator.policy(checked, run.sources[POLICY], *given)
    judges = [PlannedGenerator.judge(checked, run.sources[JUDGE], *given)] if JUDGE in run.sources else []
    # Longer ones first. Beside training state that stays, the cache waits for what that takes.
    flow, switch, *found = each_in_a_child(
        partial(sample_flow_bytes, checked, decoders[POLICY], run.launch, lengths),
        partial(resharding_bytes, checked, decoders, run.launch, NAME),
        *(partial(generate, one, 0) for one in ([policy] if is_swapped else []) + judges),
        *(partial(trace, alike[0], more) for more in counts for alike in classes),
    )
    generation = found.pop(0) if is_swapped else None
    judge = found.pop(0) if judges else None
    traces = found if is_whole else list(map(extended, found[len(classes) :], found))
    if not is_swapped:
        # The cache is as large as on the rank with the least room.
        kept = [sum(one.held.values()) for one, alike in zip(traces, classes, strict=True) if alike[0] in generating]
        (generation,) = each_in_a_child(partial(generate, policy, max(kept, default=0)))
    ranks = []
    for traced, alike in zip(traces, classes, strict=True):
        own = generation if alike[0] in generating else None
        shared = Shared() if own is None else Shared.of(checked, run.sources[POLICY], run.of_rank(alike[0]))
        slots = list(slots_of(checked, traced, own, judge, shared, is_swapped=is_swapped))
        ranks.append(RankPlan(alike[0], sorted(alike), slots))
    ranks.sort(key=lambda one: -one.fullest.peak_bytes)
    times = step_times(checked, ranks, Moved(flow, switch, is_swapped), run.device, run.launch, run.lengths)
    is_vllm = generation_engine_name(checked.config.rollout, NAME) == "vllm"
    # Of one rank, those of the others aren't known.
    sent = bytes_sent(ranks, run.launch.local_world_size) if sum(map(len, classes)) == run.launch.world_size else {}
    seconds = time.perf_counter() - started
    plan = Plan(
        run.device, run.lengths, run.launch.world_size, ranks, flow, switch, is_swapped, sent, seconds, times,
        [_AS_NATIVE] if is_vllm else [],
    )  # fmt: skip
    return replace(plan, times=None) if plan.refusals else plan


@dataclass(frozen=True)
class DryRun:
    """A step of one rank, run whole without memory, beside its plan."""

    plan: Plan
    whole: Plan

    def to_json(self) -> dict[str, Any]:
        planned, spans = (
            {slot.name: slot.span for slot in plan.ranks[0].slots if slot.span is not None}
            for plan in (self.plan, self.whole)
        )
        return {
            **self.whole.to_json(),
            "planned": self.plan.to_json()["ranks"],
            "messages": {name: _sums(span) for name, span in spans.items()},
            "planned_messages": {name: _sums(span) for name, span in planned.items()},
            "work": {name: vars(span.work) for name, span in spans.items()},
            "planned_work": {name: vars(span.work) for name, span in planned.items()},
        }

    def lines(self) -> Iterator[str]:
        """Yield peaks beside the plan's, and messages by operation and number of ranks."""
        planned = {slot.name: slot for slot in self.plan.ranks[0].slots}
        yield from self.whole.lines()
        for slot in self.whole.ranks[0].slots:
            passes = f", {slot.num_passes} micro-batches, {planned[slot.name].num_traced} of them in the plan"
            text = f"{slot.name}: {bytes_text(slot.peak_bytes)}, planned {bytes_text(planned[slot.name].peak_bytes)}"
            yield text + (passes if slot.num_passes else "")
            if slot.span is None:
                continue
            work = slot.span.work
            yield (
                f"    {work.launches} operators, {work.flops / 1e12:.4g} TFLOP of products and attention, "
                f"{bytes_text(work.num_bytes)} read and written"
            )
            for name, sent in _sums(slot.span).items():
                yield f"    sends {bytes_text(sent['bytes'])} in {sent['messages']} x {name}"


def dry_run_rank(run: PlannedRun, rank: int) -> DryRun:
    """Run the states of one rank with all of their micro-batches, and plan it."""
    return DryRun(_planned(run, [[rank]], is_whole=False), _planned(run, [[rank]], is_whole=True))


def _sums(span: Span) -> dict[str, dict[str, int]]:
    """Return the number and bytes of messages, by operation and ranks."""
    sums: dict[str, dict[str, int]] = {}
    for message, count in span.messages.items():
        of = sums.setdefault(f"{message.operation} of {len(message.ranks)} ranks", {"messages": 0, "bytes": 0})
        of["messages"] += count
        of["bytes"] += count * message.num_bytes
    return sums


def each_in_a_child(*tasks: Callable[[], Any]) -> list[Any]:
    """Return the results of tasks, each from a process of its own.

    PyTorch keeps the groups of a job in caches for the life of a process, which can be one rank only. Raises
    RuntimeError if a process ends without a result, as one does that the system stops for want of memory.
    """
    # Forked, as nothing that isn't picklable need be passed.
    context, results = multiprocessing.get_context("fork"), dict[int, Any]()
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    waiting, running = list(enumerate(tasks))[::-1], dict[Connection, tuple[int, BaseProcess]]()
    try:
        while waiting or running:
            while waiting and len(running) < num_cores:
                place, task = waiting.pop()
                receiver, sender = context.Pipe(duplex=False)
                child = context.Process(target=_send_result, args=(sender, task), daemon=True)
                child.start()
                sender.close()
                running[receiver] = place, child
            for receiver in cast(list[Connection], wait(list(running))):
                place, ended = running.pop(receiver)
                results[place] = _received(receiver, ended)
    finally:
        for _, left in running.values():
            left.kill()
            left.join()
    return [results[place] for place in range(len(tasks))]


def _received(receiver: Connection, child: BaseProcess) -> Any:
    with receiver:
        try:
            result = receiver.recv()
        except EOFError:
            result = None
        child.join()
    if result is None:
        raise RuntimeError(
            f"a process of the plan ended with {child.exitcode} and without a result; -9: out of memory?"
        )
    if isinstance(result, Exception):
        raise result
    return result[0]


def _send_result(sender: Connection, task: Callable[[], Any]) -> None:
    torch.set_num_threads(1)
    try:
        result: Any = (task(),)
    except Exception as error:
        result = error
    sender.send(result)
