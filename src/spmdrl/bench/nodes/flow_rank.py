"""One rank of the bench of nodes: runs the sample flow over each way to store samples, and writes what it measured.

Started as a process of its own, with the launcher's variables, settings as JSON in its argument, and a pipe that its
parent holds open: when the parent is gone, so is the rank.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from spmdrl.bench.harness.emulated_nodes import LinkBytes, link_bytes
from spmdrl.bench.nodes.central_buffer import CentralDock
from spmdrl.bench.nodes.sample_flow import NEEDS, FlowSize, StepRun, check_taken, make_step
from spmdrl.dataflow.samples.balancing.balance import TokenCost
from spmdrl.dataflow.samples.dock import TransferDock
from spmdrl.dataflow.samples.transport.transport import DockConfig
from spmdrl.dataflow.samples.volume import Link
from spmdrl.resources.collectives import barrier, gather_bytes
from spmdrl.resources.startup.rendezvous import Network
from spmdrl.resources.world import World, open_world

Dock = TransferDock | CentralDock
TIMEOUT_SECONDS = 60.0
RESULT_FILE, FAILURE_FILE = "result.json", "failure.txt"


@dataclass(frozen=True)
class RankTask:
    """What every rank is given."""

    size: FlowSize
    num_steps: int
    """that count; one more comes first"""
    interface: str
    folder: str
    """where rank 0 writes what all ranks measured, and the first rank to fail why"""
    is_trusted: bool = False
    """whether ranks connect without gates"""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankTask:
        values = json.loads(text)
        return cls(**{**values, "size": FlowSize(**values["size"])})


@dataclass(frozen=True)
class Measured:
    """What one rank saw in the counted steps of one way to store samples."""

    step_seconds: list[float]
    sleep_seconds: list[list[float]]
    """by step, of each worker state in the order in which they ran"""
    cpu_seconds: float
    """of all counted steps, which doesn't depend on who else is busy"""
    payload_bytes: dict[str, int]
    """by link"""
    over_link: LinkBytes
    """of the node's interface"""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Measured:
        values = json.loads(text)
        return cls(**{**values, "over_link": LinkBytes(**values["over_link"])})


def open_dock(world: World, *, locality: bool) -> TransferDock:
    """The product's dock, kept to the nodes' links. Collective over all ranks."""
    # The emulated compute grows with tokens alone.
    cost = TokenCost(linear=1, quadratic=0)
    return TransferDock(world, NEEDS, DockConfig(TIMEOUT_SECONDS, locality, network="tcp"), cost=cost)


VARIANTS: dict[str, Callable[[World], Dock]] = {
    "dock": lambda world: open_dock(world, locality=True),
    "dock, locality off": lambda world: open_dock(world, locality=False),
    "central buffer": lambda world: CentralDock(world, TIMEOUT_SECONDS),
}


def measure(dock: Dock, world: World, task: RankTask) -> Measured:
    """Run a step without emulated compute whose content is checked, then those that count. Collective."""
    at_once = replace(task.size, scored_tokens_per_second=math.inf, decode_steps_per_second=math.inf)
    _run_step(dock, world, at_once, 0)
    volume, link, cpu = _payload_bytes(dock), link_bytes(task.interface), time.process_time()
    steps = [_run_step(dock, world, task.size, step) for step in range(1, task.num_steps + 1)]
    moved = {name: count - volume[name] for name, count in _payload_bytes(dock).items()}
    cpu_seconds = time.process_time() - cpu
    over_link = link_bytes(task.interface) - link
    return Measured([seconds for seconds, _ in steps], [slept for _, slept in steps], cpu_seconds, moved, over_link)


def _run_step(dock: Dock, world: World, size: FlowSize, number: int) -> tuple[float, list[float]]:
    """How long a step took, and how long this rank slept in each of its states. Collective over all ranks."""
    step = make_step(size, world.num_nodes, number)
    prompts = step.prompts()
    barrier()
    started = time.perf_counter()
    samples: Any = dock.open_batch(number, prompts, step.group_size)
    part = StepRun(samples, step, size)
    taken = part.run()
    dock.close_batch(samples)
    seconds = time.perf_counter() - started
    if number == 0:
        check_taken(taken, step)
    return seconds, list(part.seconds.values())


def _payload_bytes(dock: Dock) -> dict[str, int]:
    return {link.value: dock.volume.payload_bytes(link) for link in Link}


def _end_with_parent() -> None:
    # Not through sys.stdin, whose lock the interpreter would wait for at its end.
    os.read(0, 1)
    os._exit(1)


def main() -> None:
    """Measure all variants one after the other, and bring the figures of all ranks to rank 0."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    task = RankTask.from_json(sys.argv[1])
    with open_world("cpu", TIMEOUT_SECONDS, network=Network(trusted=task.is_trusted)) as world:
        measured: dict[str, list[str]] = {}
        for name, open_variant in VARIANTS.items():
            with open_variant(world) as dock, _noting_failure(name, world, Path(task.folder) / FAILURE_FILE):
                own = measure(dock, world, task)
            measured[name] = [part.decode() for part in gather_bytes(own.to_json().encode())]
        if world.is_main:
            (Path(task.folder) / RESULT_FILE).write_text(json.dumps(measured))


@contextmanager
def _noting_failure(variant: str, world: World, path: Path) -> Iterator[None]:
    """Write down the exception, unless another rank was first: then it only reports a peer that is gone."""
    try:
        yield
    except Exception:
        with suppress(FileExistsError), open(path, "x") as file:
            file.write(f"{variant} on {world.num_nodes} nodes, rank {world.rank}: {traceback.format_exc()}")
        raise


if __name__ == "__main__":
    main()
