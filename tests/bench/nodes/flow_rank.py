"""One rank of the bench of nodes: runs the sample flow over each way to store samples."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from spmdrl.dataflow.samples.dock import TransferDock
from spmdrl.dataflow.samples.volume import Link
from spmdrl.nouns.settings.flow_config import DockConfig
from spmdrl.resources.collectives import barrier
from spmdrl.resources.world import World
from tests.bench.harness.emulated_nodes import LinkBytes, link_bytes
from tests.bench.nodes.sample_flow import NEEDS, FlowSize, StepRun, check_taken, make_step

TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class FlowTask:
    """What every rank does."""

    size: FlowSize
    num_steps: int
    """that count; one more comes first"""
    interface: str


@dataclass(frozen=True)
class FlowFigures:
    """What one rank measured in the counted steps of one way to store samples."""

    step_seconds: list[float]
    sleep_seconds: list[list[float]]
    """by step, of each worker state in the order in which they ran"""
    cpu_seconds: float
    """of all counted steps, which doesn't depend on who else is busy"""
    payload_bytes: dict[str, int]
    """by link"""
    over_link: LinkBytes
    """of the node's interface"""


def open_dock(world: World, *, locality: bool) -> TransferDock:
    """The product's dock, kept to the nodes' links. Collective over all ranks."""
    return TransferDock(world, NEEDS, DockConfig(TIMEOUT_SECONDS, locality, network="tcp"))


VARIANTS: dict[str, Callable[[World], TransferDock]] = {
    "dock": lambda world: open_dock(world, locality=True),
    "dock, locality off": lambda world: open_dock(world, locality=False),
}


def measure_variants(world: World, task: FlowTask) -> dict[str, FlowFigures]:
    """Measure all variants one after the other. Collective over all ranks."""
    figures = {}
    for name, open_variant in VARIANTS.items():
        with open_variant(world) as dock:
            figures[name] = _measure(dock, world, task)
    return figures


def _measure(dock: TransferDock, world: World, task: FlowTask) -> FlowFigures:
    """Run a step without emulated compute whose content is checked, then those that count. Collective."""
    at_once = replace(task.size, scored_tokens_per_second=math.inf, decode_steps_per_second=math.inf)
    _run_step(dock, world, at_once, 0)
    volume, counters, cpu = dock.volume.copy(), link_bytes(task.interface), time.process_time()
    steps = [_run_step(dock, world, task.size, step) for step in range(1, task.num_steps + 1)]
    moved = dock.volume.since(volume)
    return FlowFigures(
        step_seconds=[seconds for seconds, _ in steps],
        sleep_seconds=[slept for _, slept in steps],
        cpu_seconds=time.process_time() - cpu,
        payload_bytes={link.value: moved.payload_bytes(link) for link in Link},
        over_link=link_bytes(task.interface) - counters,
    )


def _run_step(dock: TransferDock, world: World, size: FlowSize, number: int) -> tuple[float, list[float]]:
    """How long a step took, and how long this rank slept in each of its states. Collective over all ranks."""
    step = make_step(size, world.num_nodes, number)
    prompts = step.prompts()
    barrier()
    started = time.perf_counter()
    samples = dock.open_batch(number, prompts, step.group_size)
    part = StepRun(samples, step, size)
    taken = part.run()
    dock.close_batch(samples)
    seconds = time.perf_counter() - started
    if number == 0:
        check_taken(taken, step)
    return seconds, list(part.seconds.values())
