"""Calls a function on gloo ranks, each a process on this host or on emulated nodes, and returns their results."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import torch
from torch.distributed import TCPStore

from spmdrl.resources.startup.rendezvous import Network
from spmdrl.resources.world import open_world
from spmdrl.runtime.network.sockets import LOOPBACK
from spmdrl.runtime.supervision.ending import PeerFailed
from spmdrl.verbs.doctor.commands import sigterm_as_exit
from tests.bench.harness.emulated_nodes import INTERFACE, Node
from tests.support.ranks import fork

_VARIABLES = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
# In the namespace of the first node, where no other process can have it.
_NODES_PORT = 29500
# Ranks that wait longer for each other, even on a busy machine, have lost one.
_LONGEST_WAIT_SECONDS = 300.0
_LONGEST_RUN_SECONDS = 600.0


@dataclass(frozen=True)
class BenchRanks:
    """Ranks of one thread each. They end when this process does, and their temporary files are removed."""

    count: int
    nodes: Sequence[Node] = ()
    """on which they run, equally many each; without any, on this host"""
    variables: Mapping[str, str] = field(default_factory=dict)
    """environment variables besides those that all benches set"""
    start_method: Literal["spawn", "forkserver"] = "spawn"
    """spawn: from nothing; forkserver: from a process that has imported what takes long, so they start at once"""
    network: Network = field(default_factory=Network)

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function(world, *arguments)` on every rank; returns the results in rank order.

        Raises RuntimeError with the traceback of the rank that failed first, or if the ranks take too long.
        """
        with (
            tempfile.TemporaryDirectory(prefix="spmdrl-bench-", ignore_cleanup_errors=True) as folder,
            _killed_at_end() as processes,
        ):
            # On nodes the first rank has the store.
            store = None if self.nodes else store_of_launcher()
            pipes = []
            for rank in range(self.count):
                variables = {**_VARIABLES, "TMPDIR": folder, **self.variables}
                variables |= launch_variables(rank, self.count, self.nodes)
                if store is not None:
                    variables |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
                ours, theirs = multiprocessing.Pipe(duplex=False)
                with _environment(variables):
                    process = fork(_be_rank, self, variables, theirs, function, arguments, method=self.start_method)
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            return _results(pipes)


def store_of_launcher() -> TCPStore:
    """A job's store as torchrun's agent has it: bound before the ranks get its port."""
    return TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)


def launch_variables(rank: int, num_ranks: int, nodes: Sequence[Node] = ()) -> dict[str, str]:
    """What a launcher would set for a rank; on nodes, with the interface of their links."""
    ranks_per_node = num_ranks // max(1, len(nodes))
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_RANK": rank % ranks_per_node,
        "LOCAL_WORLD_SIZE": ranks_per_node,
        "GROUP_RANK": rank // ranks_per_node,
        "GROUP_WORLD_SIZE": max(1, len(nodes)),
    }
    variables = {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": LOOPBACK}
    if nodes:
        variables |= {"MASTER_ADDR": nodes[0].address, "MASTER_PORT": str(_NODES_PORT)}
        variables |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), INTERFACE)
    return variables


@dataclass(frozen=True)
class _Outcome:
    """What a rank sends before it ends."""

    result: Any = None
    failure: str = ""
    """the traceback"""
    is_blamed_on_peer: bool = False


def _be_rank(
    ranks: BenchRanks, variables: Mapping[str, str], pipe: Connection, function: Callable[..., Any], arguments: Any
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # What libraries print must not come between a bench's figures.
    os.dup2(2, 1)
    os.environ.update(variables)
    torch.set_num_threads(1)
    if ranks.nodes:
        ranks.nodes[int(variables["GROUP_RANK"])].enter()
    try:
        with open_world("cpu", _LONGEST_WAIT_SECONDS, network=ranks.network) as world:
            outcome = _Outcome(function(world, *arguments))
    except Exception as error:
        outcome = _Outcome(failure=traceback.format_exc(), is_blamed_on_peer=isinstance(error, PeerFailed))
    pipe.send(outcome)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _results(pipes: Sequence[Connection]) -> list[Any]:
    """Wait for the outcome of every rank, but for no more of them once one has failed by itself."""
    deadline = time.monotonic() + _LONGEST_RUN_SECONDS
    outcomes: dict[Connection, _Outcome] = {}
    while len(outcomes) < len(pipes):
        ready = wait([pipe for pipe in pipes if pipe not in outcomes], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RuntimeError(f"{len(pipes)} ranks took longer than {_LONGEST_RUN_SECONDS:g} s")
        for pipe in ready:
            try:
                outcomes[pipe] = pipe.recv()
            except EOFError:
                outcomes[pipe] = _Outcome(failure="the process died without an exception")
            if outcomes[pipe].failure and not outcomes[pipe].is_blamed_on_peer:
                raise RuntimeError(f"rank {pipes.index(pipe)} failed: {outcomes[pipe].failure}")
    for rank, pipe in enumerate(pipes):
        if outcomes[pipe].failure:
            raise RuntimeError(f"rank {rank} failed: {outcomes[pipe].failure}")
    return [outcomes[pipe].result for pipe in pipes]


@contextlib.contextmanager
def _killed_at_end() -> Iterator[list[BaseProcess]]:
    """Processes of which none is left afterwards."""
    processes: list[BaseProcess] = []
    with sigterm_as_exit():
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables that processes started in the block have from the start, when the C library and OpenMP read theirs."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
