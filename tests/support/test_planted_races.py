"""Six faults in the order of streams, each planted in code of the product by taking one call away, and each found.

Every path first runs as it is, without a race.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.dataflow.resharding.swap import PinnedStore, Swap, _EventTicket
from spmdrl.engines.parallel.axis_collectives import RingShift
from spmdrl.resources.device import Device
from spmdrl.resources.memory import MemoryLedger
from spmdrl.resources.mesh import Axis
from spmdrl.resources.world import World
from tests.support import simulated_accelerator
from tests.support.ranks import run_ranks
from tests.support.simulated_accelerator.torch_module import Stream

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(simulated_accelerator.why_not() is not None, reason=str(simulated_accelerator.why_not())),
]
NUMEL = 1000
Plant = Callable[[pytest.MonkeyPatch], None]


def swap_of(world: World, tensors: Mapping[str, Tensor], make_store: Callable[..., Any] = PinnedStore) -> Swap:
    """A group for each tensor, of the same name."""
    swap = Swap(world.device, MemoryLedger(), Path(), make_store=lambda device, directory: make_store(device))
    for name, tensor in tensors.items():
        swap.add_group(name, lambda name=name, tensor=tensor: {name: tensor})
    return swap


def swap_after_a_kernel(world: World) -> None:
    """Weights leave, others take their memory, and they come back and are used."""
    weights = torch.ones(NUMEL, device=world.device.torch_device)
    swap = swap_of(world, {"update_weights": weights})
    world.device.synchronize()
    weights.mul_(2)
    swap.to_host("update_weights")
    cache = torch.full((NUMEL,), 3.0, device=world.device.torch_device)
    swap.start_return("update_weights")
    cache.add_(1)
    swap.finish_return("update_weights")
    assert torch.add(weights, 0).tolist() == [2.0] * NUMEL


def swap_two_groups(world: World) -> None:
    """One group leaves while the other returns."""
    tensors = {name: torch.ones(NUMEL, device=world.device.torch_device) for name in ("update_weights", "optimizer")}
    swap = swap_of(world, tensors, OneOfStores)
    swap.to_host("update_weights")
    swap.start_return("update_weights")
    swap.to_host("optimizer")
    swap.finish_return("update_weights")


def shift_along_a_ring(world: World) -> None:
    axis = Axis("context", world.size, world.rank, dist.group.WORLD, tuple(range(world.size)))
    own = torch.full((NUMEL,), float(world.rank), device=world.device.torch_device)
    (received,) = RingShift([own], axis).wait()
    assert torch.add(received, 0).tolist() == [float(axis.ranks[axis.rank - 1])] * NUMEL


class OneOfStores(PinnedStore):
    """A host side with slabs of its own; `shared`, where it is set, are another's."""

    shared: list[Tensor] | None = None

    def __init__(self, device: Device):
        super().__init__(device)
        if OneOfStores.shared is not None:
            self._slabs = OneOfStores.shared


class NeverRecorded(torch.Event):
    def record(self, stream: torch.Stream | None = None) -> None:
        return


def without_wait_event(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_EventTicket, "wait", lambda self: None)


def without_wait_stream(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Stream, "wait_stream", lambda self, other: None)


def freed_before_the_copy_ends(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.sim, "Event", lambda enable_timing: NeverRecorded("sim"))  # type: ignore[attr-defined]


def read_before_it_is_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Swap, "finish_return", lambda self, owner: None)


def without_work_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RingShift, "wait", lambda self: self._received)


def pinned_memory_used_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OneOfStores, "shared", [])


@contextmanager
def races_of(world: World) -> Iterator[list[str]]:
    """The races that are found inside, which are expected."""
    found: list[str] = []
    try:
        yield found
    except RuntimeError as error:
        assert "race" in str(error), error
    world.device.synchronize()
    found += world.device.module.take_races()


def run_with_and_without(world: World, run: Callable[[World], None], plant: Plant) -> tuple[list[str], list[str]]:
    with races_of(world) as sound:
        run(world)
    with races_of(world) as planted, pytest.MonkeyPatch.context() as patch:
        plant(patch)
        run(world)
    # Collectives that were cut short reach their peers before the group closes.
    dist.barrier()
    return sound, planted


CASES = {
    "a dropped wait_event": (
        swap_after_a_kernel,
        without_wait_event,
        "fill_ writes .*copy_ .of memory that was freed. uses",
    ),
    "a dropped wait_stream": (swap_after_a_kernel, without_wait_stream, "copy_ reads .*mul_ writes"),
    "free before a copy ends": (
        swap_after_a_kernel,
        freed_before_the_copy_ends,
        "fill_ writes .*copy_ .of memory that was freed. uses",
    ),
    "a returned weight read early": (swap_after_a_kernel, read_before_it_is_back, "add reads .*copy_ writes"),
    "a missing work.wait()": (shift_along_a_ring, without_work_wait, "add reads .*recv writes"),
    "a pinned buffer written while it is read": (
        swap_two_groups,
        pinned_memory_used_twice,
        "copy_ writes .*copy_ uses",
    ),
}


@pytest.mark.parametrize("run, plant, expected", CASES.values(), ids=CASES)
def test_a_planted_race_is_found_and_named(run, plant, expected):
    num_ranks = 2 if run is shift_along_a_ring else 1
    for sound, planted in run_ranks(num_ranks, run_with_and_without, run, plant, device="sim", timeout=600):
        assert sound == []
        assert len(planted) == 1 and re.search(expected, planted[0]), planted
