"""The world of ranks: launch environment, device and process group, opened and closed together."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist

from spmdrl.resources.device import Device, find_device
from spmdrl.resources.memory import return_large_blocks
from spmdrl.resources.startup.rank_agreement import Facts, agree, meet
from spmdrl.resources.startup.rendezvous import Network, meet_at_store
from spmdrl.runtime.launch import LaunchEnvironment, StartRefused, read_launch_environment
from spmdrl.runtime.network.gate import Gate
from spmdrl.runtime.network.sockets import LOOPBACK, closing_new_listeners
from spmdrl.runtime.screen import show
from spmdrl.runtime.supervision.ending import FirstFailure, PeerFailed, cause_of
from spmdrl.runtime.supervision.first_failure import find_first, peers_of, publish_process, wait_for_all
from spmdrl.runtime.supervision.stop_request import Stopped, request
from spmdrl.runtime.supervision.watch import Watch, WatchConfig

# Time for which a rank 0 that can't start looks for the others, and those for rank 0, which shows their reason.
_REFUSAL_SECONDS = 5.0
_START_SECONDS = 300.0
_LINGER_SECONDS = 5.0
# If no rank has failed, others may be anywhere in their start-up. Launchers kill after 30 s.
_STOP_LINGER_SECONDS = 10.0
_has_met = False


@dataclass(frozen=True)
class World:
    """This rank's view of the job."""

    launch: LaunchEnvironment
    device: Device
    store: dist.Store = field(default_factory=dist.HashStore)
    """store that ranks share beside the process group; it belongs to this attempt of the job"""
    timeout_seconds: float = 1800.0
    """limit of a rank's waiting for the others"""
    gate: Gate | None = None
    """gate to other ranks' services; None in a job of one rank, and on a trusted network"""
    address: str = LOOPBACK
    """address of this host, on the network that nodes share"""
    beside: dist.Store | None = None
    """second connection to the store, for watching threads; None in a job of one rank. Creating communicators blocks
    the main thread's until all ranks take part"""
    peers: dict[int, int] = field(default_factory=dict)
    """process ids by rank of the other ranks of this node, as far as visible"""
    _topics: Iterator[int] = field(default_factory=count, repr=False, compare=False)

    @property
    def rank(self) -> int:
        return self.launch.rank

    @property
    def size(self) -> int:
        return self.launch.world_size

    @property
    def local_rank(self) -> int:
        return self.launch.local_rank

    @property
    def node(self) -> int:
        return self.launch.node_rank

    @property
    def num_nodes(self) -> int:
        return self.launch.num_nodes

    @property
    def is_main(self) -> bool:
        """True if this rank writes the run's files and the screen."""
        return self.rank == 0

    def agree(self, facts: Callable[[], Facts]) -> None:
        """Compare facts over all ranks. Collective; raises StartRefused on every rank if they differ.

        `facts` isn't called in a job of one rank.
        """
        if self.size > 1:
            topic = f"agreement/{next(self._topics)}"
            agree(self.store, self.launch, topic, facts(), timeout_seconds=self.timeout_seconds)

    def first_failure(self, failure: BaseException) -> FirstFailure:
        """Return the first failure of any rank: this one, unless another rank's is known or found soon."""
        request.begin_leaving()
        if self.size == 1:
            return FirstFailure(self.rank, cause_of(failure))
        return find_first(self.store, self.rank, failure, self.peers)


@contextlib.contextmanager
def open_world(
    device: str = "auto", timeout_seconds: float = 1800.0, *, facts: Facts | None = None,
    start_timeout_seconds: float = 300.0, network: Network | None = None,
) -> Iterator[World]:  # fmt: skip
    """Join the job's process group once all ranks are here and agree about `facts`, and leave it at the end.

    Collective over all ranks. A job of one rank gets a group too, over an in-process store; gloo's port is closed to
    new connections once the group is there. `timeout_seconds` limits a collective. Raises StartRefused on every rank,
    before any collective, if facts differ or a rank is missing after `start_timeout_seconds`.
    """
    global _has_met
    launch = read_launch_environment(os.environ)
    try:
        found = find_device(device, launch.device_index)
    except ValueError as error:
        if launch.rank == 0:
            show(f"spmdrl: {error}", stream=sys.stderr)
        raise refuse_all(launch, str(error), network) from error
    found.select()
    if found.is_cpu:
        return_large_blocks()
    meeting = meet_at_store(launch, timedelta(seconds=start_timeout_seconds), network or Network())
    with _closed_at_end(meeting.gate, launch.rank):
        facts = {**(facts or {}), "the kind of device": found.kind}
        store = meeting.store
        meet(store, launch, facts, timeout_seconds=start_timeout_seconds)
        _has_met = True
        # Made while rank 0 waits for all; later, it would wait for a lost one.
        beside = meeting.beside
        if beside is None and launch.world_size > 1:
            beside = store.clone()  # type: ignore[attr-defined]  # missing in PyTorch's stub
        store.set_timeout(timedelta(seconds=timeout_seconds))
        world = World(launch, found, store, timeout_seconds, meeting.gate, meeting.address, beside)
        try:
            with _blaming_the_first(world):
                with _spreading_stops(world), closing_new_listeners():
                    publish_process(store, launch)
                    connect(world, start_timeout_seconds)
                world.peers.update(peers_of(store, launch))
                yield world
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def connect(world: World, timeout_seconds: float) -> None:
    """Make the process group, and return once it is ready on every rank.

    gloo doesn't wait for that: a rank that left its group at once would break the connections of others.
    """
    dist.init_process_group(
        world.device.backend, store=world.store, rank=world.rank, world_size=world.size,
        timeout=timedelta(seconds=world.timeout_seconds),
    )  # fmt: skip
    wait_for_all(world.store, world.size, "connected", timeout_seconds)


@contextlib.contextmanager
def _spreading_stops(world: World) -> Iterator[None]:
    """Receive requests to stop inside the block even while waiting for another rank outside of Python."""
    if not request.is_handled or world.size == 1:
        yield
        return
    with Watch(WatchConfig(world.rank, world.size), world.beside).running():
        yield


@contextlib.contextmanager
def _blaming_the_first(world: World) -> Iterator[None]:
    """Turn an error of this rank that follows from another rank's failure into PeerFailed.

    Published before the process group closes, so that the others' broken connections come second.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt, Stopped) as failure:
        if isinstance(failure, Stopped) and failure.is_agreed:
            raise
        first = world.first_failure(failure)
        # For a refusal, each rank knows whether its screen has it.
        if first.rank != world.rank and not isinstance(failure, StartRefused):
            raise PeerFailed(first) from failure
        raise


@contextlib.contextmanager
def _closed_at_end(gate: Gate | None, rank: int) -> Iterator[None]:
    """Close the gate when the job ends.

    Rank 0's comes last, within some seconds: others find the first failure or stop in the store behind it.
    """
    linger_seconds = _LINGER_SECONDS
    try:
        yield
    except Stopped as stopped:
        if rank == 0 and not stopped.is_agreed:
            linger_seconds = _STOP_LINGER_SECONDS
        raise
    finally:
        if gate is not None:
            gate.close(wait_seconds=linger_seconds)


def refuse_all(launch: LaunchEnvironment, reason: str, network: Network | None = None) -> StartRefused:
    """End the other ranks with the reason why this one can't start; returns this rank's exception.

    Rank 0 has shown the reason before; another rank shows it unless rank 0 ends the job with it or can't start for the
    same reason. Once ranks have met, none waits: then the failure that ends the world is the reason. Several nodes
    share their secret in the run's folder: without a `network` that names it, other nodes only find this rank missing,
    and the first rank of a node shows the common reason.
    """
    is_first = launch.rank == 0
    if launch.world_size == 1 or _has_met:
        return StartRefused(reason, is_shown=is_first)
    seconds = _REFUSAL_SECONDS if is_first else _START_SECONDS
    # Whatever happens here, this rank ends with the reason itself.
    try:
        meeting = meet_at_store(launch, timedelta(seconds=seconds), network or Network())
        with _closed_at_end(meeting.gate, launch.rank):
            meet(meeting.store, launch, {}, timeout_seconds=seconds, refusal=reason)
    except StartRefused as verdict:
        if verdict.is_shown or reason in str(verdict):
            return verdict
    except RuntimeError:
        pass
    return StartRefused(reason, is_shown=is_first or (launch.node_rank > 0 and launch.local_rank > 0))


def make_deterministic() -> None:
    """Refuse nondeterministic kernels from here on (`debug.deterministic`)."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
